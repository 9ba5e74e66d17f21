"""A backward that is compiled while its forward runs for the first time. See Note [A backward ahead of its call]."""

import sys
import threading

import pytest
import torch
from torch import nn

import aotkit
from aotkit import Recorder
from aotkit.driver import later
from aotkit.driver.ahead import BackwardAhead, begun_by_first_call
from aotkit.errors import CompileError

THREAD = "aotkit backward"


class Model(nn.Module):
    """Gives a loss and what it is of, as those of `transformers` do."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        logits = self.last(self.norm(self.first(x).relu()))
        return logits.logsumexp(-1).mean(), logits


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.fixture
def compiles(monkeypatch):
    """Of each backward that is compiled the thread, and what was missing."""
    seen, plain = [], later.CompileLater._backward

    def backward(self, artifact, missing):
        seen.append((threading.current_thread().name, missing))
        return plain(self, artifact, missing)

    monkeypatch.setattr(later.CompileLater, "_backward", backward)
    return seen


def fast_of(model, recorder=None, dynamic=None, **options):
    chosen = aotkit.Options().patch(**{"cache": False, "fallback": "error", "backward_ahead": True, **options})
    return torch.compile(model, backend=aotkit.make_backend(chosen, recorder or Recorder()), dynamic=dynamic)


def gradients(model, run, loss_of, x):
    model.zero_grad()
    loss_of(*run(x)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.covers("F4.33")
@pytest.mark.parametrize(
    "loss_of, threads",
    [
        (lambda loss, logits: loss, [(THREAD, (False, True))]),
        (lambda loss, logits: loss + logits.sum(), [(THREAD, (False, True)), ("main", ())]),
    ],
    ids=["as guessed", "of other results"],
)
def test_gradients_are_those_of_eager(compiles, loss_of, threads):
    model = Model()
    fast = fast_of(model)
    for _ in range(2):
        x = torch.randn(3, 8)
        torch.testing.assert_close(gradients(model, fast, loss_of, x), gradients(model, model, loss_of, x))
    found = [(name if name == THREAD else "main", missing) for name, missing in compiles]
    assert sorted(found) == threads  # the second may begin before the first


def test_it_begins_with_the_first_call_and_is_waited_for(compiles, monkeypatch):
    model, may_end = Model(), threading.Event()
    plain, ended = later.CompileLater._backward, []

    def slow(self, artifact, missing):
        assert may_end.wait(60)
        made = plain(self, artifact, missing)
        ended.append(True)
        return made

    monkeypatch.setattr(later.CompileLater, "_backward", slow)
    fast = fast_of(model)
    loss, _ = fast(torch.ones(3, 8))
    assert not ended
    threading.Timer(0.2, may_end.set).start()
    loss.backward()
    assert ended == [True] and [name for name, _ in compiles] == [THREAD]


def test_nothing_is_traced_in_the_thread(compiles, monkeypatch):
    """Tracing patches modules, which the program may be calling meanwhile."""
    traced, plain = [], torch.fx.Tracer.trace

    def trace(*args, **kwargs):
        traced.append(threading.current_thread().name)
        return plain(*args, **kwargs)

    monkeypatch.setattr(torch.fx.Tracer, "trace", trace)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.MaxPool2d(2), nn.Flatten())
    for model, x in [(layer, torch.randn(2, 5, 16)), (images, torch.randn(2, 3, 16, 16))]:
        fast_of(model, dynamic=False)(x).sum().backward()
    assert [name for name, _ in compiles] == [THREAD, THREAD]
    assert traced and THREAD not in traced


@pytest.mark.parametrize(
    "options",
    [{"backward_ahead": None}, {"backward_ahead": False}, {"verify": True}, {"lowering": "none"}, {"dynamic": True}],
    ids=str,
)
def test_where_it_is_not_begun(compiles, options):
    loss, _ = fast_of(Model(), **options)(torch.ones(3, 8))
    assert not compiles
    loss.backward()
    assert THREAD not in [name for name, _ in compiles]


def test_what_goes_wrong_is_raised_where_the_backward_is_asked_for(monkeypatch):
    def broken(self, artifact, missing):
        raise CompileError("no such kernel")

    monkeypatch.setattr(later.CompileLater, "_backward", broken)
    model = Model()
    loss, _ = fast_of(model)(torch.ones(3, 8))
    with pytest.raises(Exception, match="no such kernel"):
        loss.backward()


def test_a_program_without_a_backward_stores_nothing(compiles):
    recorder = Recorder()
    for _ in range(2):
        torch._dynamo.reset()
        fast_of(Model(), cache=True, recorder=recorder)(torch.ones(3, 8))
        for thread in threading.enumerate():
            if thread.name == THREAD:
                thread.join()
    assert [name for name, _ in compiles] == [THREAD, THREAD]
    assert "cache.loaded" not in [name for name, _ in recorder.events]


def test_what_is_taken_is_given_once():
    made = []

    def compile_backward(missing):
        made.append(missing)
        return object()

    ahead = BackwardAhead(compile_backward, (), torch.device("cpu"))
    ahead.begin()
    ahead.begin()
    first = ahead.take((False, False))
    assert made == [()] and ahead.take(()) is not first
    assert made == [(), ()]


def test_of_several_first_calls_one_begins_it():
    """Each thread found that there was something to begin, and all but one ended with an IndexError."""
    began, results, both = [], [], threading.Barrier(2)
    ahead = BackwardAhead(lambda missing: began.append(missing), (), torch.device("cpu"))
    call = begun_by_first_call(list, ahead)

    def first_call():
        lines = []

        def wait_behind_the_question(frame, event, _):
            lines.append(frame.f_lineno)
            if event == "line" and len(lines) == 2:
                both.wait(10)
            return wait_behind_the_question

        sys.settrace(lambda frame, *_: wait_behind_the_question if frame.f_code is call.__code__ else None)
        results.append(call([1]))

    threads = [threading.Thread(target=first_call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ahead.take(())
    assert results == [[1], [1]] and began == [()]


def test_nothing_is_begun_once_a_backward_was_asked_for():
    """The thread that is the first to call may come to begin it after another one's backward."""
    made = []
    ahead = BackwardAhead(made.append, (), torch.device("cpu"))
    ahead.take((True,))
    ahead.begin()
    ahead.take((True,))
    assert made == [(True,), (True,)]
