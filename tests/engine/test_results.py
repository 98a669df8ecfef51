"""What `wait` returns belongs to its caller, whatever the steps that follow put where it came from."""

from __future__ import annotations

import numpy as np
import torch

from exactrl.engine.results import IN_FLIGHT, Results


def test_results_are_the_callers_own() -> None:
    results = Results(3, torch.device("cpu"))
    results.store(torch.tensor([7, 8, 9]), torch.tensor([-0.5, -0.0, -torch.inf]))
    tokens, logprobs = results.send(2).wait()
    results.store(torch.tensor([1, 2, 3]), torch.tensor([-1.0, -2.0, -3.0]))
    for _ in range(IN_FLIGHT):
        results.send(3)
    assert tokens.tolist() == [7, 8]
    assert logprobs.view(np.int32).tolist() == np.array([-0.5, -0.0], np.float32).view(np.int32).tolist()
