"""The tree of recordings, behaviour by behaviour, on the simulated device."""

import ctypes
import gc
import threading
import time
import warnings
import weakref

import pytest
import torch

from aotkit_cudagraphs import (
    CudagraphNotice,
    CudagraphSkipped,
    CudagraphTrees,
    OverwrittenError,
    SkipKind,
    TreeOptions,
    cudagraphify,
)
from aotkit_cudagraphs._torch_compat import stash_in_thread
from aotkit_cudagraphs.drivers import SimulatedDriver


@pytest.fixture
def make():
    """Trees on a new simulated device."""

    def make_trees(**options):
        return CudagraphTrees(SimulatedDriver(capacity=1 << 20), TreeOptions(**options))

    return make_trees


def boxed(fn):
    """The callable in the boxed convention: takes a list and empties it."""

    def run(inputs):
        values = list(inputs)
        inputs.clear()
        return fn(values)

    run._boxed_call = True
    run.__name__ = fn.__name__
    return run


def info(trees, name):
    (found,) = [function for function in trees.report().functions if function.name == name]
    return found


def add_one(x):
    return x + 1


def double(x):
    return x * 2


@pytest.mark.covers("F6.7")
def test_the_first_call_runs_as_it_is_the_second_records_and_later_ones_replay(make):
    trees, runs = make(), []

    def fn(x):
        runs.append(1)
        return x + 1

    fast = trees.wrap(fn)
    seen = []
    for n in range(4):
        assert (fast(torch.full((4,), float(n))) == n + 1).all()
        seen.append((len(runs), info(trees, "fn").replays))
    assert seen == [(1, 0), (2, 1), (2, 2), (2, 3)]


@pytest.mark.covers("F6.7")
def test_a_call_under_autocast_has_a_recording_with_its_casts(make):
    trees, x = make(), torch.randn(4, 4)
    fast = trees.wrap(torch.mm)
    states = [(False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float16)]
    for enabled, dtype in [*states * 4, *(state for state in states for _ in range(4))]:
        with torch.autocast("cpu", dtype, enabled=enabled):
            result, eager = fast(x, x), torch.mm(x, x)
        assert result.dtype is eager.dtype
        torch.testing.assert_close(result, eager)
    assert info(trees, "mm").replays > 3


@pytest.mark.covers("F6.7")
def test_nothing_is_recorded_in_the_rest_of_a_step_in_which_something_warmed_up(make):
    trees = make()
    first, second = trees.wrap(add_one), trees.wrap(double)
    second(torch.ones(3))  # has run once
    trees.mark_step()
    first(torch.ones(3))  # warms up: what follows it would be recorded in a place that never comes again
    second(torch.ones(3))
    assert trees.report().recordings == ()
    for _ in range(2):
        trees.mark_step()
        second(first(torch.ones(3)))
    paths = {recording.path for recording in trees.report().recordings}
    assert paths == {("add_one",), ("add_one", "double")}


@pytest.mark.covers("F6.6")
def test_recordings_share_one_pool(make):
    def big(x):
        return (x * 2).sum(0, keepdim=True)

    def pool_bytes(*functions):
        trees = make()
        wrapped = [trees.wrap(fn) for fn in functions]
        for _ in range(3):
            trees.mark_step()
            for fast in wrapped:
                fast(torch.ones(1000))
        report = trees.report()
        assert len(report.pools) == 1 and len(report.recordings) == len(functions)
        return report.pool_bytes

    one = pool_bytes(big)
    assert pool_bytes(big, lambda x: big(x + 1)) < 2 * one + 4096
    assert pool_bytes(big, big) == one, "what the first no longer needs is enough for the second"


@pytest.mark.covers("F6.8")
def test_each_alias_class_of_a_result_is_what_it_is_without_recording(make):
    trees, held = make(), torch.arange(6.0)

    def fn(values):
        x, before, weight = values
        made = x + before
        return [made, made[1:], x[1:], x.view(torch.int32), before[:2], weight.t(), held.view(2, 3), 3, x.new_empty(0)]

    first, second = trees.wrap(add_one), trees.wrap(boxed(fn), static_input_indices=[2])
    weight = torch.randn(2, 4)
    for _ in range(4):
        trees.mark_step()
        x, start = torch.randn(4), torch.randn(4)
        before = first(start)
        got = second([x, before, weight])
        expected = fn([x, before, weight])
        for a, b in zip(got, expected, strict=True):
            assert a == b if isinstance(a, int) else torch.equal(a, b) and a.stride() == b.stride()
        assert got[0].data_ptr() + 4 == got[1].data_ptr(), "two results on one storage"
        assert got[2].data_ptr() == x.data_ptr() + 4 and got[3].data_ptr() == x.data_ptr()
        assert got[4].data_ptr() == before.data_ptr(), "memory of an earlier recording"
        assert got[5].data_ptr() == weight.data_ptr() and got[6].data_ptr() == held.data_ptr()
        del before, got
    assert info(trees, "fn").replays == 3


@pytest.mark.covers("F6.8")
@pytest.mark.parametrize("view", [lambda w: w, lambda w: w.t(), lambda w: w[1:], lambda w: w.view(torch.int32)])
def test_a_static_input_that_is_returned_shares_its_memory(make, view):
    trees, w = make(check_static_layouts=False), torch.randn(4, 4)
    fast = trees.wrap(lambda w, x: (view(w), x + 1), static_input_indices=[0])
    for _ in range(4):
        got, _ = fast(w, torch.randn(4))
        want = view(w)
        assert got.dtype is want.dtype and got.shape == want.shape and got.stride() == want.stride()
        assert got.data_ptr() == want.data_ptr()
    w.add_(1)
    assert torch.equal(got, view(w))
    if got.shape == w.shape and got.stride() == w.stride() and got.dtype is w.dtype:
        assert got._version == w._version, "whoever saved the result would not notice that it was written"


@pytest.mark.covers("F6.9", "F6.10")
def test_a_result_that_stays_in_use_gets_a_recording_of_its_own_and_is_never_overwritten(make):
    trees = make()
    first, second = trees.wrap(boxed(lambda v: [v[0] + 1])), trees.wrap(boxed(lambda v: [v.pop() * 2 + 1]))

    def step(keep):
        trees.mark_step()
        (middle,) = first([torch.zeros(4)])
        kept = middle if keep else None
        inputs = [middle]
        del middle
        (result,) = second(inputs)
        assert (result == 3).all() and (kept is None or (kept == 1).all())
        return result.data_ptr(), kept if kept is None else kept.data_ptr()

    step(False)
    for _ in range(3):
        alone, _ = step(False)
    assert len(trees.report().recordings) == 2
    for _ in range(3):
        beside, kept = step(True)
    assert len(trees.report().recordings) == 3
    assert alone == kept != beside, "with nobody else needing it, the input's memory became the result's"
    assert step(False)[0] == alone, "the first recording still serves the first case"


@pytest.mark.covers("F6.9")
@pytest.mark.parametrize(
    "holder",
    [
        lambda t: t,
        lambda t: t[1:],
        lambda t: t.untyped_storage(),
        lambda t: (t * torch.ones(4, requires_grad=True)).sum(),
        lambda t: t.numpy(),
    ],
    ids=["tensor", "view", "storage", "saved by autograd", "numpy"],
)
def test_whoever_holds_the_memory_keeps_it(make, holder):
    trees = make(patience=100)
    fast = trees.wrap(add_one)
    fast(torch.zeros(4))
    held = holder(fast(torch.zeros(4)))
    for _ in range(3):
        assert (fast(torch.ones(4)) == 2).all()
    assert info(trees, "add_one").replays == 1 and info(trees, "add_one").blocked == 3
    if isinstance(held, torch.Tensor) and held.requires_grad:
        assert held == 4 and held.backward() is None
    del held
    fast(torch.ones(4))
    assert info(trees, "add_one").replays == 2


@pytest.mark.covers("F6.10", "F6.11")
def test_a_static_input_that_moves_is_recorded_again_without_counting(make):
    trees = make(max_rerecords=0, max_static_variants=3, max_static_moves=1000)
    fast = trees.wrap(lambda w: w * 2, static_input_indices=[0], name="fn")
    weights = [torch.full((4,), float(n)) for n in range(200)]
    for weight in weights:
        assert torch.equal(fast(weight), weight * 2)
    assert info(trees, "fn").uncaptured == 0 and len(trees.report().recordings) == 3
    before = info(trees, "fn").replays
    assert torch.equal(fast(weights[-2]), weights[-2] * 2)
    assert info(trees, "fn").replays == before + 1 and len(trees.report().recordings) == 3


@pytest.mark.covers("F6.11")
def test_a_static_input_that_never_stays_is_copied_instead(make):
    trees = make(max_static_variants=2, max_static_moves=2)
    fast = trees.wrap(lambda w: w * 2, static_input_indices=[0], name="fn")
    weights = [torch.full((4,), float(n)) for n in range(30)]
    for weight in weights:
        assert torch.equal(fast(weight), weight * 2)
    report = trees.report()
    assert len(report.recordings) <= 3 and any(recording.replays > 10 for recording in report.recordings)


@pytest.mark.covers("F6.11", "F6.18")
def test_recordings_for_other_reasons_are_limited(make):
    trees = make(max_rerecords=1)
    first, second = trees.wrap(add_one), trees.wrap(double)
    for size in range(1, 5):
        first(torch.ones(size))
    second(torch.ones(9))
    with pytest.warns(CudagraphNotice, match="recorded 2 times for the same input layouts"):
        for size in range(1, 5):  # each path is another place in the tree
            trees.mark_step()
            first(torch.ones(size))
            assert (second(torch.ones(9)) == 2).all()
    assert [reason.kind for reason in info(trees, "double").skips] == [SkipKind.RERECORD_LIMIT]


@pytest.mark.covers("F6.12", "F6.18")
def test_a_tensor_that_the_callable_keeps_to_itself_is_refused_with_its_size(make):
    trees, cache = make(), []

    def fn(x):
        cache.append(x + 1)
        return x * 2

    fast = trees.wrap(fn)
    assert (fast(torch.ones(100)) == 2).all()
    with pytest.warns(CudagraphNotice, match=r"1 tensors \(400 bytes\) made while recording are neither results nor"):
        assert (fast(torch.ones(100)) == 2).all()
    assert [reason.kind for reason in info(trees, "fn").skips] == [SkipKind.LEAKED_MEMORY]
    other = trees.wrap(add_one)
    for _ in range(3):
        assert (other(torch.ones(4)) == 2).all()
    assert info(trees, "add_one").replays == 2


@pytest.mark.covers("F6.13", "F6.16")
def test_a_step_does_not_end_before_the_backward_has_run(make):
    trees = make()
    forward = trees.wrap(add_one, training=True, name="forward")
    backward = forward.backward(double, name="backward")
    for _ in range(3):
        saved = forward(torch.ones(4))
        assert (backward(saved) == 4).all()
        del saved
    assert [r.path for r in trees.report().recordings] == [("forward",), ("forward", "backward")]
    first = forward(torch.ones(4))
    with pytest.warns(CudagraphNotice, match="forward runs again before the backward of an earlier call"):
        second = forward(torch.ones(4) * 5)
    assert (backward(second) == 12).all() and (backward(first) == 4).all()
    del first, second
    assert ("forward", "forward") in [r.path for r in trees.report().recordings]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(forward(torch.ones(4)))


@pytest.mark.covers("F6.13")
def test_a_marked_step_starts_at_the_top(make):
    trees = make()
    fast = trees.wrap(add_one)
    for _ in range(3):
        trees.mark_step()
        x = torch.zeros(4)
        for _ in range(3):
            x = fast(x)
        assert (x == 3).all()
        del x
    names = [recording.path for recording in trees.report().recordings]
    assert names == [("add_one",) * n for n in (1, 2, 3)], "within a marked step the same callable goes on down"


@pytest.mark.covers("F6.13", "F6.14")
def test_zero_copy_results_raise_a_clear_error_once_their_memory_is_taken(make):
    trees = make(outputs="overwrite")
    forward = trees.wrap(add_one, training=True, name="forward")
    backward = forward.backward(double, name="backward")
    for _ in range(2):
        grad = backward(forward(torch.ones(4)))
    assert (grad == 4).all()
    result = forward(torch.ones(4))
    assert (result == 2).all() and info(trees, "forward").replays == 2
    with pytest.raises(OverwrittenError, match=r"result 0 of backward .* became a parameter's \.grad"):
        grad + 1
    backward(result)
    forward(torch.ones(4))
    for use in (lambda: result + 1, lambda: torch.cat([result]), lambda: result.shape, lambda: print(result)):
        with pytest.raises(OverwrittenError, match="memory"):
            use()


@pytest.mark.covers("F6.13")
def test_zero_copy_results_may_be_the_next_steps_inputs(make):
    trees = make(outputs="overwrite")
    fast = trees.wrap(add_one)
    x = torch.zeros(4)
    for _ in range(5):
        x = fast(x)
    assert (x == 5).all() and info(trees, "add_one").replays == 4


@pytest.mark.covers("F6.15")
def test_a_replay_makes_one_alias_per_result_and_copies_nothing(make):
    trees = make()
    fast = trees.wrap(boxed(lambda v: [v[0] + 1, v[0] * 2]))
    for _ in range(2):
        fast([torch.ones(4)])
    addresses = {tuple(t.data_ptr() for t in fast([torch.ones(4)])) for _ in range(5)}
    assert len(addresses) == 1 and info(trees, "<lambda>").copied_results == ()


@pytest.mark.covers("F6.4")
def test_each_size_is_recorded_and_the_ninth_is_announced_once(make):
    trees = make()
    fast = trees.wrap(lambda x, n: x * n, name="fn")

    def call(n):
        for _ in range(2):
            assert torch.equal(fast(torch.ones(n), n), torch.ones(n) * n)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(1, 9):
            call(n)
    assert len(trees.report().recordings) == 8
    with pytest.warns(CudagraphNotice, match="now has a recording for each of 9 input sizes") as caught:
        call(9)
        call(10)
    assert len(caught) == 1 and len(trees.report().recordings) == 10


@pytest.mark.covers("F6.4", "F6.18")
def test_sizes_can_be_listed_limited_or_left_out(make):
    def kinds_after(sizes, **options):
        trees = make(**options)
        fast = trees.wrap(lambda x, n: x * n, name="fn")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CudagraphNotice)
            for n in sizes:
                for _ in range(2):
                    assert torch.equal(fast(torch.ones(n), n), torch.ones(n) * n)
        return [reason.kind for reason in info(trees, "fn").skips], info(trees, "fn").replays

    assert kinds_after([2, 3], capture_sizes=frozenset({(2,)})) == ([SkipKind.SIZE_NOT_LISTED], 1)
    assert kinds_after([2, 3], skip_dynamic=True) == ([SkipKind.DYNAMIC_SHAPES] * 2, 0)
    assert kinds_after([2, 3, 4], max_sizes=2) == ([SkipKind.RECORDING_LIMIT], 2)


@pytest.mark.covers("F6.5")
def test_the_last_callable_takes_the_manager_and_its_memory_with_it():
    trees = CudagraphTrees(SimulatedDriver(capacity=1 << 16))
    fast, other = trees.wrap(add_one), trees.wrap(double)
    for _ in range(2):
        result = fast(torch.ones(4))
        other(torch.ones(4))
    manager, arena = weakref.ref(trees.manager()), weakref.ref(trees.manager().pools[0].handle._arena)
    del other
    assert len(trees.report().recordings) == 1
    del fast
    assert trees.report().recordings == () and trees.report().pools == () and trees.driver._pools == []
    del trees
    gc.collect()
    assert manager() is None and (result == 2).all()
    del result
    gc.collect()
    assert arena() is None, "the memory went with the last result in it"


def test_a_callable_that_dies_while_another_is_recorded_is_dropped_afterwards(make):
    trees = make()
    wrapped = [trees.wrap(add_one, name="dying")]

    def fn(x):
        wrapped.clear()
        return x * 2

    survivor = trees.wrap(fn, name="survivor")
    survivor(torch.ones(4))
    wrapped.append(trees.wrap(add_one, name="dying"))
    for _ in range(2):
        trees.mark_step()
        wrapped[0](torch.ones(4))
    wrapped[0](torch.ones(4))
    assert (survivor(torch.ones(4)) == 2).all()
    assert wrapped == [] and "dying" not in {function.name for function in trees.report().functions}
    for _ in range(3):
        trees.mark_step()
        assert (survivor(torch.ones(4)) == 2).all()
    assert trees.report().recordings[0].path == ("survivor",)


@pytest.mark.covers("F6.25")
def test_results_stay_valid_and_only_those_that_are_kept_get_copied(make):
    trees = make()
    fast = trees.wrap(boxed(lambda v: [v[0] + 1, v[0] * 2]), name="fn")
    kept = []
    for n in range(6):
        plus, times = fast([torch.full((4,), float(n))])
        kept.append(plus)
        del times
    assert [t[0].item() for t in kept] == [1, 2, 3, 4, 5, 6]
    assert info(trees, "fn").copied_results == (0,) and info(trees, "fn").replays == 5


@pytest.mark.covers("F6.25")
def test_a_result_that_is_suddenly_kept_blocks_one_call_and_then_moves_the_recordings(make):
    trees = make(patience=1)
    fast = trees.wrap(add_one)
    for _ in range(3):
        fast(torch.ones(4))
    kept = fast(torch.ones(4))
    fast(torch.ones(4))
    assert info(trees, "add_one").blocked == 1
    for n in range(5):
        assert (fast(torch.full((4,), float(n))) == n + 1).all() and (kept == 2).all()
    report = trees.report()
    assert info(trees, "add_one").blocked == 2 and [pool.number for pool in report.pools] == [2]
    assert info(trees, "add_one").copied_results == (0,)


@pytest.mark.covers("F6.26")
def test_gradients_accumulate_over_four_micro_steps_as_without_recording(make):
    trees = make()

    def forward(x, w):
        active = torch.relu(x @ w)
        return active.sum(), active, x

    def backward(inputs):
        active, x, w, grad = inputs
        inputs.clear()
        masked = grad.expand_as(active) * (active > 0)
        return [masked @ w.t(), x.t() @ masked]

    backward._boxed_call = True
    fast = trees.wrap(forward, static_input_indices=[1], training=True)
    fast_backward = fast.backward(backward, static_input_indices=[2])

    class Compiled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            loss, *ctx.kept = fast(x, w)
            ctx.kept.append(w)
            return loss

        @staticmethod
        def backward(ctx, grad):
            inputs, ctx.kept = [*ctx.kept, grad], None
            return tuple(fast_backward(inputs))

    weight = torch.nn.Parameter(torch.randn(16, 16))
    twin = torch.nn.Parameter(weight.detach().clone())
    for _ in range(4):
        for _ in range(4):
            x = torch.randn(8, 16)
            Compiled.apply(x, weight).backward()
            torch.relu(x @ twin).sum().backward()
            assert torch.allclose(weight.grad, twin.grad, rtol=1e-6, atol=1e-5)
        with torch.no_grad():
            for parameter in (weight, twin):
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    assert info(trees, "forward").replays == info(trees, "forward backward").replays == 15
    assert 1 in info(trees, "forward backward").copied_results


@pytest.mark.covers("F6.27")
def test_thirty_two_threads_get_their_own_results(make):
    trees, wrong = make(), []
    fast = trees.wrap(lambda x: x * 2 + 1, name="fn")

    def work(n):
        kept = []
        for k in range(5):
            x = torch.full((64,), float(n * 100 + k))
            kept.append((fast(x), x * 2 + 1))
        wrong.extend(n for got, expected in kept if not torch.equal(got, expected))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    deadline = time.monotonic() + 60  # a thread's local objects, and with them its pools, go a moment after `join`
    while (trees.report().recordings or trees.driver._pools) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert trees.report().recordings == () and trees.driver._pools == [], "what a thread recorded ends with it"


@pytest.mark.covers("F6.27")
def test_a_backward_in_another_thread_that_torch_starts_belongs_to_its_callers_tree(make):
    trees = make()
    manager = trees.manager()
    state = torch._C._get_obj_in_tls("aotkit_cudagraphs.thread")
    found = []
    thread = threading.Thread(target=lambda: found.append(trees.manager()))
    thread.start()
    thread.join()
    assert found[0] is not manager

    def adopted():
        stash_in_thread("aotkit_cudagraphs.thread", state)  # as torch does for the threads of autograd
        found.append(trees.manager())

    thread = threading.Thread(target=adopted)
    thread.start()
    thread.join()
    assert found[1] is manager


@pytest.mark.parametrize("taken", [0, 1], ids=["torch 2.11", "torch 2.12"])
def test_the_thread_s_object_lives_as_long_as_torch_refers_to_it(make, monkeypatch, taken):
    """Torch gives one reference back when the thread ends; 2.11 takes none: a crash at the first call."""
    stashed, references = {}, ctypes.pythonapi

    def stash(key, value):
        stashed[key] = weakref.ref(value)
        for _ in range(taken):
            references.Py_IncRef(ctypes.py_object(value))

    monkeypatch.setattr(torch._C, "_stash_obj_in_tls", stash)
    monkeypatch.setattr(torch._C, "_is_key_in_tls", stashed.__contains__)
    monkeypatch.setattr(torch._C, "_get_obj_in_tls", lambda key: stashed[key]())
    trees = make()
    fast = trees.wrap(add_one)
    for _ in range(3):
        assert (fast(torch.ones(4)) == 2).all()
    (thread,) = stashed.values()
    assert thread() is not None, "torch would read the memory of a dead object"
    assert trees.report().recordings != ()
    references.Py_DecRef(ctypes.py_object(thread()))
    assert thread() is None and trees.report().recordings == (), "what a thread recorded ends with it"


@pytest.mark.covers("F6.28")
def test_the_report_adds_up_to_the_pool_and_names_paths(make):
    trees = make()
    first, second = trees.wrap(add_one), trees.wrap(lambda x: torch.cat([x, x]), name="twice")
    for _ in range(3):
        trees.mark_step()
        second(first(torch.ones(200)))
    report = trees.report()
    assert sum(recording.added_bytes for recording in report.recordings) == report.pool_bytes > 0
    assert report.pool_bytes == report.pools[0].reserved_bytes and report.pools[0].live_bytes == 0
    assert [r.path_bytes for r in report.recordings] == [800, 800 + 1600]
    assert "add_one > twice (float32[200] in path)" in str(report) and "2 replays" in str(report)


@pytest.mark.covers("F6.28")
def test_a_memory_cap_drops_the_pool_that_was_not_used_for_the_longest_time(make):
    trees = make(max_pool_bytes=20_000)
    functions = [trees.wrap(lambda x, k=k: x + k, name=f"fn{k}") for k in range(4)]
    x = torch.ones(1200)  # 4 800 bytes, and as much for the result
    for k in (0, 0, 1, 1, 0, 2, 2):
        assert (functions[k](x) == k + 1).all()
        trees.mark_step()
        assert trees.report().pool_bytes <= 20_000
    names = {recording.name for recording in trees.report().recordings}
    assert "fn2" in names and "fn1" not in names
    big = trees.wrap(lambda x: x.repeat(8), name="big")
    with pytest.warns(CudagraphNotice, match="big needs .* of 20000; raise max_pool_bytes"):
        for _ in range(3):
            trees.mark_step()
            assert big(x).numel() == 9600
    assert [reason.kind for reason in info(trees, "big").skips] == [SkipKind.MEMORY_CAP]
    assert trees.report().pool_bytes <= 20_000


@pytest.mark.covers("F6.17")
def test_inputs_in_memory_of_the_path_and_static_ones_may_be_written(make):
    trees, counter = make(), torch.zeros(4)

    def change(x, counter):
        x.mul_(2)
        counter.add_(1)
        return x + counter

    first, second = trees.wrap(add_one), trees.wrap(change, static_input_indices=[1])
    for n in range(1, 5):
        trees.mark_step()
        middle = first(torch.ones(4))
        if n > 1:
            assert (second(middle, counter) == 4 + counter).all() and (middle == 4).all() and counter[0] == n - 1
        del middle
    assert info(trees, "change").replays == 2


@pytest.mark.covers("F6.17", "F6.18")
def test_a_written_input_that_would_be_a_copy_is_refused_with_the_users_line(make):
    trees = make()

    def fn(x, y):
        x.mul_(2)  # the line
        return x + y

    fast = trees.wrap(fn)
    x = torch.ones(4)
    fast(x, x + 1)
    with pytest.warns(CudagraphNotice, match=r"input 0 of fn is written.*test_cudagraphs_trees.py:\d+: x.mul_\(2\)"):
        assert (fast(x, torch.ones(4)) == 5).all()
    assert x[0] == 4 and info(trees, "fn").replays == 0


@pytest.mark.covers("F6.17")
def test_a_copied_view_of_a_written_static_input_is_refused(make):
    trees, counter = make(), torch.zeros(4)

    def fn(view, counter):
        counter.add_(1)
        return view + 0

    fast = trees.wrap(fn, static_input_indices=[1])
    for _ in range(3):
        fast(torch.zeros(2), counter)
    with pytest.warns(CudagraphNotice, match="input 0 of fn is written, or shares memory with one that is"):
        assert (fast(counter[:2], counter) == 4).all()
    assert info(trees, "fn").replays == 2


@pytest.mark.covers("F6.18")
@pytest.mark.parametrize(
    "fn", [lambda x: (x * 2).conj(), lambda x: (x * 2).conj().imag, lambda x: x @ x.conj(), lambda x: x * 2]
)
@pytest.mark.parametrize("lazy", [False, True])
def test_lazily_conjugated_and_negated_tensors_are_never_taken_for_their_memory(make, fn, lazy):
    trees = make()
    fast = trees.wrap(fn, name="fn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CudagraphNotice)
        for n in range(8):
            x = torch.randn(4, 4, dtype=torch.complex64)
            x = x.conj() if lazy or n > 5 else x
            assert torch.equal(fast(x), fn(x))
        simple = cudagraphify(fn, [x], driver=SimulatedDriver(capacity=1 << 16))
        assert torch.equal(simple(x), fn(x)) and torch.equal(simple(x.resolve_conj()), fn(x))
    kinds = {reason.kind for reason in info(trees, "fn").skips}
    assert kinds and kinds <= {SkipKind.LAZY_VIEW, SkipKind.CAPTURE_FAILED}


def test_autograd_notices_that_a_replay_wrote_what_it_saved(make):
    trees, counter, weight = make(), torch.ones(4), torch.ones(4, requires_grad=True)

    def fn(counter):
        counter.add_(1)
        return counter * 2

    fast = trees.wrap(fn, static_input_indices=[0])
    fast(counter)
    fast(counter)
    loss = (weight * counter).sum()
    fast(counter)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def first_two_as_bytes(x):
    y = x + 1
    return y, y[:2].view(torch.uint8), y[1:]


@pytest.mark.parametrize("written", [0, 1, 2])
@pytest.mark.parametrize("outputs", ["survive", "overwrite", "copy"])
def test_autograd_notices_a_write_to_another_result_in_the_same_memory(make, outputs, written):
    trees, weight = make(outputs=outputs), torch.ones(4, requires_grad=True)
    fast = trees.wrap(first_two_as_bytes)
    for _ in range(4):
        trees.mark_step()
        results = fast(torch.ones(4))
        loss = (weight * results[0]).sum()
        results[written].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del results, loss
    assert info(trees, "first_two_as_bytes").replays == 3


@pytest.mark.parametrize("given", ["static", "in the path", "copied"])
def test_autograd_notices_a_write_to_a_result_that_is_a_view_of_an_input(make, given):
    trees, weight = make(), torch.ones(4, requires_grad=True)
    first, second = trees.wrap(add_one), trees.wrap(lambda x: x[1:], static_input_indices=[0] * (given == "static"))
    simple = cudagraphify(lambda x: x[1:], [torch.ones(4)], driver=SimulatedDriver(capacity=1 << 16))
    kept = torch.ones(4)
    for _ in range(4):
        trees.mark_step()
        x = first(torch.ones(4)) if given == "in the path" else kept
        for view in (second(x), simple(x)):
            loss = (weight * x).sum()
            view.zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            del loss
        del x, view


def test_autograd_notices_a_write_to_a_recorded_result_by_a_call_that_runs_as_it_is(make):
    trees, weight = make(), torch.ones(4, requires_grad=True)

    def change(x):
        x.mul_(2)
        return x + 1

    first, second = trees.wrap(add_one), trees.wrap(change)
    for _ in range(2):
        first(torch.ones(4))
    trees.mark_step()
    middle = first(torch.ones(4))
    loss = (weight * middle).sum()
    assert (second(middle) == 5).all() and info(trees, "change").warm_ups == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_notices_a_write_to_a_result_of_an_earlier_recording(make):
    trees, weight = make(), torch.ones(4, requires_grad=True)

    def change(x):
        x.mul_(2)
        return x + 1

    first, second = trees.wrap(add_one), trees.wrap(change)
    for _ in range(4):
        trees.mark_step()
        middle = first(torch.ones(4))
        loss = (weight * middle).sum()
        second(middle)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del middle, loss
    assert info(trees, "change").replays == 3


@pytest.mark.parametrize("check", [True, False])
def test_static_inputs_may_be_missing_misaligned_or_no_tensors(make, check):
    trees, memory = make(check_static_layouts=check), torch.arange(20.0)
    fast = trees.wrap(lambda a, b, x: a + x if b is None else a + x * b, static_input_indices=[0, 1], name="fn")
    for a in (memory[:8], memory[1:9], memory[4:12]):
        for b in (None, 3, torch.full((8,), 2.0)):
            for n in range(3):
                x = torch.full((8,), float(n))
                assert torch.equal(fast(a, b, x), a + x if b is None else a + x * b)
    assert info(trees, "fn").replays >= 12


@pytest.mark.covers("F6.19")
def test_on_skip_raise_raises_before_anything_ran(make):
    trees, runs = make(on_skip="raise"), []
    fast = trees.wrap(lambda x, text: runs.append(1))
    with pytest.raises(CudagraphSkipped, match="input 1 is a str"):
        fast(torch.ones(2), "text")
    assert runs == []


@pytest.mark.covers("F6.21", "F6.18")
def test_where_the_forward_is_skipped_so_is_its_backward(make):
    trees = make()
    forward = trees.wrap(lambda x: x * x.sum().item(), training=True, name="forward")
    backward = forward.backward(double)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CudagraphNotice)
        for _ in range(3):
            backward(forward(torch.ones(3)))
    assert len(caught) == 2 and "the forward of forward backward, is not recorded" in str(caught[1].message)
    assert [reason.kind for reason in info(trees, "forward backward").skips] == [SkipKind.FORWARD_SKIPPED]
    (reason,) = info(trees, "forward").skips
    assert reason.kind is SkipKind.CAPTURE_FAILED and "test_cudagraphs_trees.py" in reason.user_line


@pytest.mark.covers("F6.21")
def test_a_backward_runs_on_its_forwards_device(make):
    trees = make()
    forward = trees.wrap(add_one, training=True)
    assert forward.backward(double)._trees is trees


@pytest.mark.covers("F6.18")
def test_a_device_without_the_caching_allocator_records_nothing():
    class Bare(SimulatedDriver):
        def unusable_reason(self):
            return "torch's caching allocator is off"

    trees = CudagraphTrees(Bare())
    fast = trees.wrap(add_one)
    with pytest.warns(CudagraphNotice, match="caching allocator is off"):
        assert (fast(torch.ones(2)) == 2).all()
    assert [reason.kind for reason in info(trees, "add_one").skips] == [SkipKind.NO_CACHING_ALLOCATOR]


@pytest.mark.covers("F6.3")
def test_recording_in_a_tree_leaves_the_random_state_alone(make):
    trees = make()

    def fn(x):
        return torch.dropout(x, 0.5, True)

    fast = trees.wrap(fn)
    torch.manual_seed(0)
    got = [fast(torch.ones(100)).clone() for _ in range(4)]
    torch.manual_seed(0)
    assert all(torch.equal(a, fn(torch.ones(100))) for a in got) and info(trees, "fn").replays == 3


def test_calls_on_another_stream_wait_for_what_was_issued_before(make):
    trees = make()
    fast, driver = trees.wrap(add_one), trees.driver
    for _ in range(2):
        fast(torch.ones(4))
    side = driver.new_stream()
    with driver.use_stream(side):
        assert (fast(torch.ones(4) * 3) == 4).all()
    assert info(trees, "add_one").replays == 2


def test_an_error_of_the_callable_while_recording_is_passed_on_and_leaves_the_tree_usable(make):
    trees, fail = make(), []

    def fn(x):
        y = x + 1
        if fail:
            raise KeyError("mine")
        return y

    fast = trees.wrap(fn)
    fast(torch.ones(4))
    fail.append(1)
    with pytest.raises(KeyError, match="mine"):
        fast(torch.ones(4))
    fail.clear()
    for _ in range(3):
        assert (fast(torch.ones(4)) == 2).all()
    assert info(trees, "fn").replays >= 2


def test_a_wrapped_callable_inside_another_is_part_of_its_recording(make):
    trees = make()
    inner = trees.wrap(add_one)
    outer = trees.wrap(lambda x: inner(x) * 2, name="outer")
    for _ in range(4):
        assert (outer(torch.ones(4)) == 4).all()
    assert info(trees, "outer").replays == 3


def test_wrong_options_are_errors():
    for bad in ({"outputs": "maybe"}, {"on_skip": "maybe"}, {"alignment": 12}, {"max_sizes": 0}, {"patience": -1}):
        with pytest.raises(ValueError):
            TreeOptions(**bad)


@pytest.mark.covers("F6.29", "F6.18")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_callable_is_returned_with_one_notice():
    trees = CudagraphTrees()
    with pytest.warns(CudagraphNotice, match="no CUDA device") as caught:
        assert trees.wrap(add_one) is add_one
    assert len(caught) == 1 and caught[0].filename == __file__
    with pytest.raises(CudagraphSkipped, match="no CUDA device"):
        CudagraphTrees(options=TreeOptions(on_skip="raise")).wrap(add_one)


@pytest.mark.covers("F6.5")
@pytest.mark.parametrize("recorded_before", [False, True])
def test_while_the_caller_records_a_call_is_part_of_that_recording(make, recorded_before):
    trees = make()
    fast, driver = trees.wrap(torch.sin, name="sine"), trees.driver
    for _ in range(3 * recorded_before):
        fast(torch.ones(4))
    x = torch.randn(4)
    recording, result = driver.capture(lambda: fast(x) + 1, pool=driver.new_pool(), stream=driver.new_stream())
    x.add_(1)
    driver.replay(recording)
    assert torch.equal(result, x.sin() + 1)
    assert info(trees, "sine").replays == 2 * recorded_before
    for _ in range(3):
        assert torch.equal(fast(x), x.sin())


@pytest.mark.covers("F6.5")
@pytest.mark.parametrize("same", [torch.from_dlpack, lambda x: torch.from_dlpack(x[1:])])
def test_a_copied_tensor_on_memory_that_is_written_is_refused_whatever_storage_it_has(make, same):
    def fn(state, x):
        state.add_(1)
        return x * 2

    trees, state, expected = make(), torch.zeros(5), torch.zeros(5)
    fast = trees.wrap(fn, static_input_indices=[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CudagraphNotice)
        for _ in range(3):
            for given, plain in [(torch.ones(4), torch.ones(4)), (same(state)[-4:], same(expected)[-4:])]:
                assert torch.equal(fast(state, given), fn(expected, plain)) and torch.equal(state, expected)
    assert info(trees, "fn").replays > 0 and info(trees, "fn").uncaptured > 0


def test_control_flow_in_a_callable_runs_as_it_is(make):
    trees = make()

    def fn(x):
        return torch.ops.higher_order.cond(x.sum() > 0, add_one, double, (x,)) * 2

    fast = trees.wrap(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CudagraphNotice)
        for n in (1.0, -1.0, 2.0, -2.0):
            assert torch.equal(fast(torch.full((4,), n)), fn(torch.full((4,), n)))
    assert info(trees, "fn").replays == 0
