"""The page's only style sheet. Light and dark follow the reader's system; one column on a phone."""

CSS = """
:root{color-scheme:light dark;--bg:#fbfaf8;--card:#fff;--ink:#1f2328;--soft:#5c636b;--line:#e3e1dc;--grid:#eceae5;
--c1:#2b67b1;--c2:#c05a10;--c3:#127a68;--c4:#8650a0;--good:#14693f;--goodbg:#e6f3ea;--bad:#a61b1b;--badbg:#fdeaea;
--warn:#7a5300;--warnbg:#fdf3d9;--off:#474d54;--offbg:#ecebe8}
@media(prefers-color-scheme:dark){:root{--bg:#15181c;--card:#1c2026;--ink:#e4e6e8;--soft:#a0a7af;--line:#31363d;
--grid:#2a2f36;--c1:#74aef0;--c2:#f0a05a;--c3:#56c2ab;--c4:#c596dd;--good:#84d6a6;--goodbg:#17301f;--bad:#ff9a94;
--badbg:#3d1b1b;--warn:#ecc468;--warnbg:#362b10;--off:#c3c8cd;--offbg:#2a2e34}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 56px}
header p{margin:0;color:var(--soft);overflow-wrap:anywhere}
h1{margin:2px 0 4px;font-size:1.75rem;line-height:1.2;font-weight:650;overflow-wrap:anywhere}
h2{margin:40px 0 12px;font-size:1.15rem;font-weight:650}
h3{margin:22px 0 6px;font-size:1rem;font-weight:650}
.note{margin:0 0 10px;color:var(--soft);font-size:.92rem}
.verdict{margin:22px 0 14px;padding:18px 22px;border-radius:10px;border-left:6px solid currentColor}
.verdict p{margin:0;font-size:1.5rem;line-height:1.3;font-weight:650;font-variant-numeric:tabular-nums}
.verdict ul{margin:8px 0 0;padding:0;list-style:none;color:var(--ink);font-size:.95rem}
.good{color:var(--good);background:var(--goodbg)}.bad{color:var(--bad);background:var(--badbg)}
.warn{color:var(--warn);background:var(--warnbg)}.off{color:var(--off);background:var(--offbg)}
.bad p{font-size:1.7rem}
.notes{margin:14px 0;padding:12px 22px;border:1px solid var(--line);border-radius:10px;font-size:.95rem}
.notes b{font-weight:650}.notes ul{margin:4px 0 0;padding-left:18px}
dl.keys{display:grid;grid-template-columns:repeat(auto-fit,minmax(220px,1fr));gap:12px;margin:14px 0 0}
dl.keys div{padding:12px 16px;background:var(--card);border:1px solid var(--line);border-radius:10px}
dl.keys dt{color:var(--soft);font-size:.86rem;overflow-wrap:anywhere}
dl.keys dd{margin:2px 0 0;font-size:1.3rem;font-weight:600;font-variant-numeric:tabular-nums}
dl.keys dd small{display:block;color:var(--soft);font-size:.8rem;font-weight:400}
.charts{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:14px}
figure{display:flex;flex-direction:column;justify-content:space-between;margin:0;padding:14px 14px 10px;
background:var(--card);border:1px solid var(--line);border-radius:10px;min-width:0}
figcaption{font-size:.95rem;padding:0 4px 6px}figcaption b{font-weight:650}figcaption span{color:var(--soft)}
figcaption ul{display:flex;flex-wrap:wrap;gap:2px 16px;margin:2px 0 0;padding:0;list-style:none;color:var(--soft);
font-size:.86rem}
figcaption i{display:inline-block;width:14px;height:0;margin-right:6px;vertical-align:middle;border-top:2.5px solid}
figcaption i.bar{height:11px;border:0;border-radius:2px;background:currentColor}
figcaption i.points{width:9px;height:9px;border:0;border-radius:50%;background:currentColor}
.k1{color:var(--c1)}.k2{color:var(--c2)}.k3{color:var(--c3)}.k4{color:var(--c4)}
figcaption i.k2.line{border-top-style:dashed}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{fill:var(--soft);font-size:12.5px;font-variant-numeric:tabular-nums}
.ty{text-anchor:end}.tx,.say,.nan{text-anchor:middle}svg .say{fill:var(--ink);font-size:14px}
svg .nan{fill:var(--bad);font-size:18px;font-weight:700}
.grid{stroke:var(--grid);fill:none}.tick,.axis{stroke:var(--soft);fill:none}
polyline{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
polyline.points{stroke-dasharray:2 5}polyline.c2.line{stroke-dasharray:6 4}
polyline.c1{stroke:var(--c1)}polyline.c2{stroke:var(--c2)}polyline.c3{stroke:var(--c3)}polyline.c4{stroke:var(--c4)}
.dot.c1,.bar.c1{fill:var(--c1)}.dot.c2,.bar.c2{fill:var(--c2)}.dot.c3,.bar.c3{fill:var(--c3)}
.dot.c4,.bar.c4{fill:var(--c4)}
.hit{fill:transparent}.hit:hover{fill:var(--ink);fill-opacity:.07}
table{width:100%;border-collapse:collapse;background:var(--card);border:1px solid var(--line);font-size:.92rem}
th,td{padding:8px 12px;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:600;white-space:nowrap}
td.num,th.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.text,pre{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;
overflow-wrap:anywhere}
.text{max-height:14em;overflow:auto;unicode-bidi:isolate;min-width:9em}
.cut{color:var(--soft);font-style:italic;font-family:system-ui,sans-serif}
details{margin:10px 0;background:var(--card);border:1px solid var(--line);border-radius:10px}
summary{padding:10px 16px;cursor:pointer;font-weight:600}details>*:not(summary){margin:0 16px 14px}
pre{padding:0}.wide{overflow-x:auto}.wide table{width:100%}
footer{margin-top:36px;color:var(--soft);font-size:.88rem}
@media(max-width:720px){main{padding:18px 14px 40px}.charts{grid-template-columns:minmax(0,1fr)}
.verdict{padding:14px 16px}.verdict p{font-size:1.25rem}dl.keys{grid-template-columns:repeat(2,minmax(0,1fr))}
svg text{font-size:14.5px}
table.cards,.cards tbody,.cards tr,.cards td{display:block}.cards thead{display:none}
table.cards{border:0;background:none}
.cards tr{margin-bottom:10px;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:6px 0}
.cards td{border:0;padding:4px 14px;text-align:left}.cards td.num{display:inline-block}
.cards td::before{content:attr(data-label);display:block;color:var(--soft);font:600 .8rem system-ui,sans-serif}}
@media print{details{break-inside:avoid}figure,.cards tr{break-inside:avoid}.text{max-height:none}}
"""
