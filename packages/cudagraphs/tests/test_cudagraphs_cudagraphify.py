"""`cudagraphify` on the simulated device: always what the callable itself would give, or a reason."""

import threading
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from aotkit_cudagraphs import (
    CudagraphedFunction,
    CudagraphNotice,
    CudagraphOptions,
    CudagraphSkipped,
    SkipKind,
    SkipReason,
    cudagraphify,
)
from aotkit_cudagraphs.dispatch import UndoWrites
from aotkit_cudagraphs.drivers import SimulatedDriver


class Recorder:
    def __init__(self):
        self.events = []

    def event(self, name, fields):
        self.events.append((name, dict(fields)))


class CountingDriver(SimulatedDriver):
    """Counts captures and replays."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.captures = self.replays = 0

    def capture(self, fn, *, pool, stream):
        self.captures += 1
        return super().capture(fn, pool=pool, stream=stream)

    def replay(self, recording):
        self.replays += 1
        super().replay(recording)


@pytest.fixture
def driver():
    return CountingDriver(capacity=1 << 20)


def kinds(function):
    return [reason.kind for reason in function.report().skips]


@pytest.mark.covers("F6.1")
def test_a_call_under_autocast_has_a_recording_with_its_casts(driver):
    x = torch.randn(4, 4)
    fast = cudagraphify(torch.mm, [x, x], driver=driver)
    for enabled, dtype in [(False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float16)] * 2:
        with torch.autocast("cpu", dtype, enabled=enabled):
            result, eager = fast(x, x), torch.mm(x, x)
        assert result.dtype is eager.dtype
        torch.testing.assert_close(result, eager)
    assert driver.captures == 3
    assert "float32[4, 4], float32[4, 4]" in str(fast.report())


@pytest.mark.covers("F6.1")
def test_a_hundred_replays_equal_the_callable(driver):
    weight, bias = torch.randn(16, 16), torch.randn(16)

    def fn(x, weight, bias):
        return torch.softmax(x @ weight + bias, -1), x.sum()

    fast = cudagraphify(fn, [torch.randn(4, 16), weight, bias], static_input_indices=[1, 2], driver=driver)
    for _ in range(100):
        x = torch.randn(4, 16)
        weight.mul_(0.99)  # a static input is read anew by each replay
        for got, expected in zip(fast(x, weight, bias), fn(x, weight, bias), strict=True):
            assert torch.equal(got, expected)
    assert (driver.captures, driver.replays) == (1, 100)


@pytest.mark.covers("F6.1", "F6.2")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 1, 5).expand(3, 4, 5),
        lambda: torch.randn(()).expand(3, 4),
        lambda: torch.randn(5, 4).t(),
        lambda: torch.randn(4, 10)[:, ::3],
        lambda: torch.randn(20).as_strided((4, 3), (2, 1)),
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(0, 4),
        lambda: torch.randn(9)[1:],
        lambda: torch.randn(6).expand(2, 6).as_strided((2, 4, 3), (0, 1, 1)),
        lambda: torch.randn(4).to(torch.bfloat16),
    ],
    ids=["expanded", "scalar", "transposed", "strided", "overlap", "channels_last", "empty", "offset", "both", "half"],
)
def test_inputs_of_any_layout_are_copied_right(driver, make):
    seen = []

    def fn(x):
        seen.append(x.stride())
        return x * 2, x.sum(0)

    fast = cudagraphify(fn, [make()], driver=driver)
    for _ in range(3):
        x = make()
        got, expected = fast(x), (x * 2, x.sum(0))
        assert all(map(torch.equal, got, expected))
        assert [t.stride() for t in got] == [t.stride() for t in expected]
    assert driver.captures == 1 and set(seen) == {make().stride()}, "the callable sees the strides of its input"


@pytest.mark.covers("F6.1")
def test_a_misaligned_static_input_is_copied_instead(driver):
    memory = torch.randn(33)
    for first, other in ((0, 1), (1, 0)):  # the misaligned one in either place: positions must not be mixed up
        inputs = [torch.empty(0), torch.empty(0)]
        inputs[first], inputs[other] = memory[1:17], torch.randn(16)
        assert inputs[first].data_ptr() % 16 and not inputs[other].data_ptr() % 16
        fast = cudagraphify(lambda a, b: a - b, inputs, static_input_indices=[0, 1], driver=driver)
        inputs[first].add_(1)
        assert torch.equal(fast(*inputs), inputs[0] - inputs[1])
        moved = list(inputs)
        moved[first] = memory[5:21]  # copied, so it may be anywhere
        assert torch.equal(fast(*moved), moved[0] - moved[1])
        assert fast.report().rerecords == 0


@pytest.mark.covers("F6.3")
def test_fake_inputs_defer_the_recording_to_the_first_real_call(driver):
    with FakeTensorMode():
        fake = torch.empty(4)
    fast = cudagraphify(lambda x: x + torch.rand(4), [fake], driver=driver)
    assert driver.captures == 0
    torch.manual_seed(3)
    got = fast(torch.zeros(4))
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(got, torch.rand(4)) and torch.equal(after, torch.rand(1))
    assert driver.captures == 1


@pytest.mark.covers("F6.3")
def test_recording_leaves_the_random_state_alone(driver):
    before = torch.get_rng_state()
    cudagraphify(lambda x: torch.dropout(x, 0.5, True), [torch.ones(8)], driver=driver)
    assert torch.equal(torch.get_rng_state(), before)


def test_random_numbers_differ_from_call_to_call_as_without_recording(driver):
    def fn(x):
        return torch.dropout(x, 0.5, True)

    fast = cudagraphify(fn, [torch.ones(100)], driver=driver)
    torch.manual_seed(0)
    got = [fast(torch.ones(100)) for _ in range(3)]
    torch.manual_seed(0)
    assert all(torch.equal(a, fn(torch.ones(100))) for a in got)
    assert not torch.equal(got[0], got[1])


@pytest.mark.covers("F6.17")
def test_buffers_that_the_callable_updates_are_updated_once_per_call(driver):
    norm, twin = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    counter = torch.zeros(2)

    def fn(x, counter):
        counter.add_(1)
        return norm(x)

    with torch.no_grad():
        fast = cudagraphify(fn, [torch.randn(8, 4), counter], static_input_indices=[1], driver=driver)
        assert counter[0] == 0 and torch.equal(norm.running_mean, twin.running_mean)
        for step in range(1, 4):
            x = torch.randn(8, 4)
            assert torch.equal(fast(x, counter), twin(x))
            assert counter[0] == step
            assert torch.equal(norm.running_mean, twin.running_mean)
            assert torch.equal(norm.running_var, twin.running_var)
            assert norm.num_batches_tracked == step


@pytest.mark.covers("F6.17", "F6.18")
def test_a_written_input_that_is_not_static_is_not_recorded_and_still_right(driver):
    def fn(x, y):
        x.mul_(2)
        return x + y

    with pytest.warns(CudagraphNotice, match="input 0 is written, but would be a copy"):
        fast = cudagraphify(fn, [torch.ones(4), torch.ones(4)], driver=driver)
    x = torch.ones(4)
    assert torch.equal(fast(x, torch.ones(4)), torch.full((4,), 3.0)) and x[0] == 2
    assert driver.replays == 0 and kinds(fast) == [SkipKind.MUTATED_INPUT]


def test_a_write_that_only_the_caller_knows_of_can_be_declared(driver):
    def fn(x, total):
        total.numpy()[:] += 1.0  # stands for a kernel that bypasses the dispatcher
        return x + 1

    total = torch.zeros(4)
    inputs = [torch.ones(4), total]
    with pytest.warns(CudagraphNotice, match="input 1 is written"):
        cudagraphify(fn, inputs, mutated_input_indices=[1], driver=driver)
    assert (total == 0).all(), "warm-up ran on a copy"
    options = CudagraphOptions(warmup_iterations=3)
    cudagraphify(fn, inputs, static_input_indices=[1], mutated_input_indices=[1], driver=driver, options=options)
    assert (total == 1).all(), "three warm-up runs were taken back; the capture's own host write is not device work"


@pytest.mark.covers("F6.25")
def test_results_survive_later_calls_by_default(driver):
    fast = cudagraphify(lambda x: (x + 1, x * 2), [torch.zeros(4)], driver=driver)
    results = [fast(torch.full((4,), float(n))) for n in range(5)]
    for n, (plus, times) in enumerate(results):
        assert (plus == n + 1).all() and (times == 2 * n).all()


@pytest.mark.covers("F6.25")
def test_zero_copy_results_are_overwritten_by_the_next_call(driver):
    options = CudagraphOptions(outputs="overwrite")
    fast = cudagraphify(lambda x: x + 1, [torch.zeros(4)], driver=driver, options=options)
    first = fast(torch.zeros(4))
    assert (first == 1).all()
    second = fast(torch.ones(4))
    assert first.data_ptr() == second.data_ptr() and (first == 2).all()


@pytest.mark.covers("F6.8")
def test_results_alias_what_they_would_alias_without_recording(driver):
    held = torch.arange(6.0)

    def fn(x, w):
        made = x * 2
        return made, made[1:], x[1:], x.view(torch.int32), w.t(), held.view(2, 3), x

    w = torch.randn(3, 3)
    memory = torch.randn(9)
    fast = cudagraphify(fn, [torch.randn(8), w], static_input_indices=[1], driver=driver)
    for x in (torch.randn(8), memory[1:]):
        got, expected = fast(x, w), fn(x, w)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()
        got[0].fill_(5)
        assert (got[1] == 5).all(), "two results on one storage stay so"
        x.fill_(7)
        assert (got[2] == 7).all() and (got[6] == 7).all() and got[6].data_ptr() == x.data_ptr()
        assert got[3].data_ptr() == x.data_ptr()
        assert got[4].data_ptr() == w.data_ptr() and got[5].data_ptr() == held.data_ptr()


def test_results_keep_their_structure(driver):
    def fn(x, n):
        return {"a": [x + n, None], "b": (n, True)}

    fast = cudagraphify(fn, [torch.zeros(2), 3], driver=driver)
    got = fast(torch.ones(2), 3)
    assert (got["a"][0] == 4).all() and got["a"][1] is None and got["b"] == (3, True)


def test_boxed_callables_stay_boxed(driver):
    def fn(inputs):
        x, y = inputs
        inputs.clear()
        return [x + y]

    fn._boxed_call = True
    fast = cudagraphify(fn, [torch.ones(2), torch.ones(2)], driver=driver)
    assert fast._boxed_call
    inputs = [torch.ones(2), torch.full((2,), 4.0)]
    assert (fast(inputs)[0] == 5).all() and inputs == []


@pytest.mark.covers("F6.4")
def test_each_size_and_integer_gets_its_own_recording_up_to_the_limit(driver):
    options = CudagraphOptions(max_recordings=3)
    fast = cudagraphify(lambda x, n: x * n, [torch.ones(2), 2], driver=driver, options=options)
    for size, n in [(2, 2), (3, 2), (2, 5), (3, 2), (2, 2)]:
        assert torch.equal(fast(torch.ones(size), n), torch.ones(size) * n)
    assert driver.captures == 3 and fast.report().uncaptured == 0
    with pytest.warns(CudagraphNotice, match="3 recordings for other input layouts"):
        assert torch.equal(fast(torch.ones(9), 2), torch.ones(9) * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(fast(torch.ones(9), 2), torch.ones(9) * 2)
    assert driver.captures == 3 and fast.report().uncaptured == 2


@pytest.mark.parametrize("other", [torch.ones(1, 4), torch.ones(4, dtype=torch.float64), torch.ones(8)[::2]])
def test_another_layout_never_replays_the_recording_of_the_first(driver, other):
    fast = cudagraphify(lambda x: x + 1, [torch.ones(4)], driver=driver)
    got = fast(other)
    assert torch.equal(got, other + 1) and got.dtype == other.dtype and got.shape == other.shape
    assert driver.captures == 2


@pytest.mark.covers("F6.11")
def test_a_moved_static_input_is_recorded_again_up_to_the_limit(driver):
    options = CudagraphOptions(max_rerecords=2)
    fast = cudagraphify(lambda w: w * 2, [torch.ones(4)], static_input_indices=[0], driver=driver, options=options)
    weights = [torch.full((4,), float(n)) for n in range(4)]
    for weight in weights[:2]:
        assert torch.equal(fast(weight), weight * 2)
    assert driver.captures == 3
    with pytest.warns(CudagraphNotice, match="moved 2 times"):
        assert torch.equal(fast(weights[2]), weights[2] * 2)
    assert torch.equal(fast(weights[1]), weights[1] * 2), "the last recording still serves its input"
    report = fast.report()
    assert (driver.captures, report.rerecords, report.uncaptured) == (3, 2, 1)


def test_without_the_address_check_a_moved_input_is_the_callers_promise_broken(driver):
    options = CudagraphOptions(check_static_addresses=False)
    w = torch.ones(4)
    fast = cudagraphify(lambda w: w * 2, [w], static_input_indices=[0], driver=driver, options=options)
    assert (fast(torch.full((4,), 9.0)) == 2).all()
    assert driver.captures == 1


@pytest.mark.covers("F6.18")
@pytest.mark.parametrize(
    "fn, inputs, kind",
    [
        (lambda x: x * x.sum().item(), [torch.ones(3)], SkipKind.CAPTURE_FAILED),
        (lambda x: x[x > 0], [torch.ones(3)], SkipKind.CAPTURE_FAILED),
        (lambda x, s: x + len(s), [torch.ones(3), "text"], SkipKind.NON_TENSOR_INPUT),
        (lambda x: (x + 1, "text"), [torch.ones(3)], SkipKind.NON_TENSOR_OUTPUT),
        (lambda n: n + 1, [3], SkipKind.NO_DEVICE_TENSOR),
        (lambda x: x.to_dense(), [torch.eye(3).to_sparse()], SkipKind.SPARSE),
        (lambda x: x + 1, [torch.ones(3, requires_grad=True)], SkipKind.REQUIRES_GRAD),
        (lambda x, y: x + 1, [torch.ones(3), torch.ones(3, device="meta")], SkipKind.MULTIPLE_DEVICES),
    ],
)
def test_each_reason_runs_the_callable_with_one_notice(driver, fn, inputs, kind):
    observer = Recorder()
    with pytest.warns(CudagraphNotice):
        fast = cudagraphify(fn, inputs, driver=driver, observer=observer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = fast(*inputs)
    expected = fn(*inputs)
    for a, b in zip(
        got if isinstance(got, tuple) else [got], expected if isinstance(got, tuple) else [expected], strict=True
    ):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert kinds(fast) == [kind] and observer.events[0][0] == "cudagraphs.skip"
    assert observer.events[0][1]["kind"] == kind.name and driver.replays == 0
    with pytest.raises(CudagraphSkipped) as caught:
        cudagraphify(fn, inputs, driver=driver, options=CudagraphOptions(on_skip="raise"))
    assert [reason.kind for reason in caught.value.reasons] == [kind]


def test_gradients_are_not_lost(driver):
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        fast = cudagraphify(lambda x: x * 3, [x], driver=driver)
        assert not fast(x).requires_grad
    with pytest.warns(CudagraphNotice, match="requires gradients"):
        fast(x).sum().backward()
    assert (x.grad == 3).all()


@pytest.mark.covers("F6.29", "F6.18")
def test_cpu_tensors_without_a_driver_return_the_callable_with_one_notice():
    def fn(x):
        return x + 1

    with pytest.warns(CudagraphNotice, match="the inputs are on cpu") as caught:
        assert cudagraphify(fn, [torch.ones(2)]) is fn
    assert len(caught) == 1 and caught[0].filename == __file__
    with pytest.raises(CudagraphSkipped, match="the inputs are on cpu"):
        cudagraphify(fn, [torch.ones(2)], options=CudagraphOptions(on_skip="raise"))


def test_the_callables_own_error_is_passed_on_and_leaves_no_trace(driver):
    counter = torch.zeros(1)

    def fn(x):
        counter.add_(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        cudagraphify(fn, [torch.ones(2)], driver=driver)
    assert counter == 0


@pytest.mark.covers("F6.27")
def test_many_threads_get_their_own_results(driver):
    fast = cudagraphify(lambda x: x * 2 + 1, [torch.ones(64)], driver=driver)
    wrong = []

    def work(n):
        for _ in range(10):
            x = torch.full((64,), float(n))
            if not torch.equal(fast(x), x * 2 + 1):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and driver.captures == 1


def test_calls_on_another_stream_wait_for_the_last_call(driver):
    fast = cudagraphify(lambda x: x * 2, [torch.ones(4)], driver=driver)
    fast(torch.ones(4))
    side = driver.new_stream()
    with driver.use_stream(side):
        x = torch.ones(4) * 3
        assert (fast(x) == 6).all()


@pytest.mark.covers("F6.28")
def test_the_report_adds_up_and_reset_frees_everything(driver):
    observer = Recorder()
    fast = cudagraphify(lambda x: x + 1, [torch.ones(200)], driver=driver, observer=observer)
    fast(torch.ones(500))
    report = fast.report()
    assert [r.pool_bytes for r in report.recordings] == [1024, 2048] and report.pool_bytes == 3072
    assert "2 recordings, 3072 bytes; 1 replays" in str(report) and "float32[500]" in str(report)
    assert [name for name, _ in observer.events] == ["cudagraphs.record"] * 2
    fast.reset()
    assert fast.report().recordings == () and driver._pools == []
    assert (fast(torch.ones(200)) == 2).all()


def test_wrong_indices_and_options_are_errors(driver):
    with pytest.raises(IndexError, match="no input 2"):
        cudagraphify(lambda x: x, [torch.ones(2)], static_input_indices=[2], driver=driver)
    for bad in ({"outputs": "maybe"}, {"on_skip": "maybe"}, {"warmup_iterations": 0}, {"alignment": 12}):
        with pytest.raises(ValueError):
            CudagraphOptions(**bad)


def test_a_failed_capture_keeps_no_pool(driver):
    with pytest.warns(CudagraphNotice):
        fast = cudagraphify(lambda x: x.sum().item(), [torch.ones(3)], driver=driver)
    assert isinstance(fast, CudagraphedFunction) and driver._pools == []


def test_reasons_print_and_round_trip():
    reason = SkipReason(SkipKind.SPARSE, "input 0 has layout torch.sparse_coo", "model.py:3: return x")
    assert SkipReason.from_json(reason.to_json()) == reason
    assert str(reason) == "input 0 has layout torch.sparse_coo (model.py:3: return x); " + SkipKind.SPARSE.value


def test_a_recording_is_not_used_where_gradients_are_needed_or_inputs_stop_being_recordable(driver):
    fast = cudagraphify(lambda x, y: x * 2, [torch.ones(3), None], driver=driver)
    assert (fast(torch.ones(3), None) == 2).all() and driver.replays == 1
    with pytest.warns(CudagraphNotice, match="requires gradients"):
        assert fast(torch.ones(3, requires_grad=True), None).requires_grad
    with pytest.warns(CudagraphNotice, match="input 1 is a list"):
        fast(torch.ones(3), [1])
    with pytest.warns(CudagraphNotice, match="input 0 is on meta"):
        assert fast(torch.ones(3, device="meta"), None).device.type == "meta"
    assert driver.replays == 1


def test_a_parameter_and_a_tensor_share_a_recording(driver):
    weight = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    fast = cudagraphify(lambda w: w * 2, [weight], static_input_indices=[0], driver=driver)
    assert torch.equal(fast(weight.detach()), fast(weight)) and driver.captures == 1


@pytest.mark.covers("F6.1")
@pytest.mark.parametrize("same", [torch.Tensor.detach, torch.from_dlpack, lambda x: torch.from_dlpack(x[1:])])
def test_a_copy_of_what_is_written_in_place_is_noticed_at_each_call(driver, same):
    def fn(state, x):
        state.add_(1)
        return x * 2

    state, expected = torch.zeros(5), torch.zeros(5)
    fast = cudagraphify(fn, [state, torch.zeros(4)], static_input_indices=[0], driver=driver)
    for given, plain in [(torch.ones(4), torch.ones(4)), (same(state)[-4:], same(expected)[-4:])] * 2:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CudagraphNotice)
            assert torch.equal(fast(state, given), fn(expected, plain))
        assert torch.equal(state, expected)
    assert fast.report().replays == 2 and kinds(fast) == [SkipKind.MUTATED_INPUT]


@pytest.mark.covers("F6.1")
def test_while_the_caller_records_the_callable_is_part_of_that_recording(driver):
    fast = cudagraphify(torch.sin, [torch.ones(4)], driver=driver)
    x, pool, replays = torch.randn(4), driver.new_pool(), driver.replays
    recording, result = driver.capture(lambda: fast(x) + 1, pool=pool, stream=driver.new_stream())
    first, made = driver.capture(
        lambda: cudagraphify(torch.cos, [x], driver=driver)(x), pool=driver.new_pool(), stream=driver.new_stream()
    )
    assert driver.replays == replays and fast.report().uncaptured == 1
    x.add_(1)
    driver.replay(recording)
    driver.replay(first)
    assert torch.equal(result, x.sin() + 1) and torch.equal(made, x.cos())


@pytest.mark.covers("F6.1")
def test_what_a_warm_up_wrote_is_taken_back_behind_its_work_where_it_raises(driver, monkeypatch):
    order, undo = [], UndoWrites.undo
    wait = driver.synchronize

    def fn(state):
        state.add_(1)
        order.append("written")
        raise KeyError("a setting")

    monkeypatch.setattr(driver, "synchronize", lambda: (order.append("waited"), wait()))
    monkeypatch.setattr(UndoWrites, "undo", lambda self: (order.append("undone"), undo(self)))
    state = torch.zeros(3)
    with pytest.raises(KeyError, match="a setting"):
        cudagraphify(fn, [state], static_input_indices=[0], driver=driver)
    assert order[-3:] == ["written", "waited", "undone"] and torch.equal(state, torch.zeros(3))


@pytest.mark.covers("F6.1")
def test_a_generator_of_the_caller_s_draws_what_it_draws_without_recordings(driver):
    """torch tells no other generator than the default one that it is being recorded: the capture fails."""
    mine, theirs = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)

    def fn(x, generator=mine):
        return x + torch.rand(4, generator=generator)

    with pytest.warns(CudagraphNotice, match="generator"):
        fast = cudagraphify(fn, [torch.zeros(4)], driver=driver)
    for _ in range(3):
        assert torch.equal(fast(torch.ones(4)), fn(torch.ones(4), theirs))
    assert kinds(fast) == [SkipKind.CAPTURE_FAILED]
