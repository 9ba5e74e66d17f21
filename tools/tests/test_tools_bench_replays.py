"""The bench of what replays take of the processor."""

from types import SimpleNamespace

import torch
from torch import nn

from tools.bench import replays


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x):
        return SimpleNamespace(logits=self.layers(x))


def test_each_step_is_one_replay_forward_and_one_backward():
    steps = replays.parts_of_steps(3, Small(), torch.randn(2, 3, 4, 4))
    assert [len(parts) for parts in steps] == [len(replays.PARTS)] * 3
    assert all(part > 0 for parts in steps for part in parts)


def test_the_table_has_a_row_for_each_part(monkeypatch, capsys):
    monkeypatch.setattr(replays, "parts_of_steps", lambda steps, model, images: [[1e-6] * len(replays.PARTS)] * steps)
    monkeypatch.setattr(replays, "make_model", lambda: None)
    assert replays.main(["--steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(replays.PARTS) + 3 and lines[-1] == f"| all | {len(replays.PARTS)} |"
