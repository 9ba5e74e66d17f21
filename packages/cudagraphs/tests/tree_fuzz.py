"""Random programs over trees of recordings, run twice: recorded on the simulated device, and plain.

    python packages/cudagraphs/tests/tree_fuzz.py --programs 2000 [--seed 0] [--device cuda]

After every action all results that the program holds must equal their plain twins. Each recording must be where a model
written here puts it: the model knows which results the program holds and how an allocator works, and asks the
package only which recording came after which. At the end nothing may be left in use. With `--device cuda` the same
programs run on a GPU, without the model.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import threading
import time
import warnings
from dataclasses import dataclass, field

import torch

from aotkit_cudagraphs import CudagraphNotice, CudagraphTrees, TreeOptions
from aotkit_cudagraphs.drivers import CudaDriver, SimulatedDriver

GRANULARITY = 512
SIZES = (5, 100, 300, 1000)
KINDS = ("add", "add", "half", "neg", "cat", "sum", "noise", "view", "change", "drop", "write", "write")


class Wrong(AssertionError):
    """The recorded run differs from the plain one, or from the model."""


# --- callables --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """A callable of one-dimensional tensors: `inputs` of them, then `weights` that stay where they are, then an int.

    steps: (operation, first value, second value), each making one value; "drop" forgets one, "write" changes a weight.
    returned: values that are returned.
    """

    inputs: int
    weights: int
    steps: tuple[tuple[str, int, int], ...]
    returned: tuple[int, ...]
    training: bool = False


def random_spec(rng: random.Random) -> Spec:
    """A callable with up to eight steps."""
    inputs, weights = rng.randint(1, 3), rng.randint(0, 2)
    steps, values = [], inputs + weights
    for _ in range(rng.randint(2, 8)):
        kind = rng.choice(
            ["add", "add", "half", "neg", "cat", "sum", "noise", "view", "change", "drop", "write", "write"]
        )
        steps.append((kind, rng.randrange(values), rng.randrange(values)))
        values += kind not in ("drop", "write", "change")
    returned = tuple(rng.randrange(values) for _ in range(rng.randint(1, 4)))
    return Spec(inputs, weights, tuple(steps), returned, training=rng.random() < 0.3)


def run_spec(spec: Spec, args: list) -> list:
    """Run it; dropped values are those that the steps drop and, at the end, all that are not returned."""
    *values, scale = args
    args.clear()
    protected = set(range(spec.inputs + spec.weights))
    for kind, i, j in spec.steps:
        if kind == "drop":
            values[i] = None if i not in spec.returned else values[i]
            continue
        if values[i] is None or values[j] is None:
            if kind not in ("write", "change"):
                values.append(None)
            continue
        match kind:
            case "add":
                size = min(values[i].numel(), values[j].numel())
                values.append(values[i][:size] + values[j][:size])
            case "half":
                values.append(values[i] * (0.5 * scale))
            case "neg":
                values.append(-values[i])
            case "cat":
                values.append(torch.cat([values[i][:1000], values[j][:1000]]))
            case "sum":
                values.append(values[i][:100].sum(0, keepdim=True))
            case "noise":
                values.append(torch.rand(values[i].numel(), device=values[i].device) + values[i])
            case "view":
                values.append(values[i][values[i].numel() // 2 :])
            case "change":
                if fresh_only(spec, i, protected):
                    values[i].mul_(0.75)
            case "write":
                if spec.weights:
                    weight = values[spec.inputs]
                    if weight is not None:
                        weight[:5].mul_(0.5)
    return [values[k] for k in spec.returned]


def fresh_only(spec: Spec, value: int, protected: set[int]) -> bool:
    """Whether a value is new memory: no input, and no view of one."""
    steps = [step for step in spec.steps if step[0] not in ("drop", "write", "change")]
    while value not in protected:
        kind, first, _ = steps[value - len(protected)]
        if kind != "view":
            return True
        value = first
    return False


# --- model of memory --------------------------------------------------------------------------------------------


class ModelPool:
    """A first-fit allocator, and how far it ever went."""

    def __init__(self) -> None:
        self.extent = 0

    def place(self, used: dict[object, tuple[int, int]], nbytes: int) -> tuple[int, int]:
        """Where a block of `nbytes` goes beside `used` ones, all as (offset, size)."""
        size = -(-nbytes // GRANULARITY) * GRANULARITY
        offset = 0
        for start, length in sorted(used.values()):
            if start - offset >= size:
                break
            offset = max(offset, start + length)
        self.extent = max(self.extent, offset + size)
        return offset, size


@dataclass(eq=False)
class ModelNode:
    """What the model knows of a recording: offset and size of each new result's block, by its leaf numbers."""

    blocks: dict[tuple[int, ...], tuple[int, int]]


def predict(spec: Spec, pool: ModelPool, args: list, used: dict[object, tuple[int, int]]) -> ModelNode:
    """Where the results of a recording go.

    args: per tensor argument (elements, bytes to copy or None, block it is in or None for memory outside the pool).
    used: blocks of results that are held by others.
    """
    used = dict(used) | {("path", block): block for _, _, block in args if block is not None}
    memory: list = []  # per value: a key of `used`, "outside", or None if dropped; and how many elements it has
    for index, (elements, copied, block) in enumerate(args):
        home: object = "outside"
        if copied is not None:
            home = ("buffer", index)
            used[home] = pool.place(used, copied)
        elif block is not None:
            home = ("path", block)
        memory.append((home, elements))
    made = _predict_steps(spec, pool, memory, used)
    leaves: dict[object, list[int]] = {}
    for leaf, value in enumerate(spec.returned):
        home = memory[value]
        if home is not None and home[0] in made:
            leaves.setdefault(home[0], []).append(leaf)
    return ModelNode({tuple(found): used[home] for home, found in leaves.items()})


def _predict_steps(spec: Spec, pool: ModelPool, memory: list, used: dict) -> set:
    made = set()

    def collect() -> None:
        alive = {entry[0] for entry in memory if entry is not None}
        for home in [home for home in used if isinstance(home, tuple) and home[0] in ("buffer", "path", "made")]:
            if home not in alive:
                del used[home]

    def new(elements: int, number: int) -> tuple[object, int]:
        collect()
        home = ("made", number)
        made.add(home)
        used[home] = pool.place(used, 4 * elements)
        return home, elements

    for number, (kind, i, j) in enumerate(spec.steps):
        if kind == "drop":
            memory[i] = None if i not in spec.returned else memory[i]
        elif kind in ("write", "change"):
            continue
        elif memory[i] is None or memory[j] is None:
            memory.append(None)
        elif kind == "view":
            home, elements = memory[i]
            memory.append((home, elements - elements // 2))
        elif kind == "noise":
            collect()
            used["noise"] = pool.place(used, 4 * memory[i][1])
            memory.append(new(memory[i][1], number))
            del used["noise"]
        else:
            first, second = memory[i][1], memory[j][1]
            sizes = {"add": min(first, second), "cat": min(first, 1000) + min(second, 1000), "sum": 1}
            memory.append(new(sizes.get(kind, first), number))
    return made


# --- programs ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Held:
    """A result that the program holds, and its plain twin."""

    real: torch.Tensor
    plain: torch.Tensor


@dataclass(eq=False)
class World:
    """One program's state."""

    rng: random.Random
    driver: SimulatedDriver
    trees: CudagraphTrees
    specs: list[Spec]
    sizes: tuple[int, ...]
    functions: list
    weights: list[list[Held]]
    held: list[Held] = field(default_factory=list)
    retired: list = field(default_factory=list)
    grads: list[Held] = field(default_factory=list)
    pools: dict = field(default_factory=dict)
    nodes: dict = field(default_factory=dict)
    call: tuple = ()
    recordings: int = 0
    device: str = "cpu"

    def seed(self, seed: int) -> None:
        """Seed the generator that callables draw from."""
        if self.device == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.cuda.manual_seed(seed)

    def randn(self, count: int) -> torch.Tensor:
        """Random elements on the device."""
        return torch.randn(count, device=self.device)

    def event(self, name: str, fields: dict) -> None:
        """A recording was made: compare it with the model."""
        if name == "cudagraphs.node":
            self.recordings += 1
            if self.device == "cpu":
                self.check_node(fields["node"])

    def check_node(self, node) -> None:
        """The recording is where the model puts it, and knows who holds what."""
        spec, tensors = self.call
        pool = self.pools.setdefault(node.pool, ModelPool())
        base = node.pool.handle._base
        path = node.path()[:-1]
        known = {}
        for before in path:
            for leaves, block in self.nodes[before].blocks.items():
                # What is at an address now is what came there last: the others' memory was free to be taken.
                known = {key: other for key, other in known.items() if not overlap(other, block)}
                known[before, leaves] = block
        holding = {held.real.untyped_storage().data_ptr() for held in [*self.held, *self.grads]}
        in_use = {key: block for key, block in known.items() if base + block[0] in holding}
        slots = {slot.address - base for slot in node.survivors}
        if slots != {block[0] for block in in_use.values()}:
            raise Wrong(f"recorded beside {slots}, but {in_use} are held")
        args = []
        for recorded, (elements, span, address) in zip(node.inputs, tensors, strict=False):
            place = recorded.place.name
            block = next((block for block in known.values() if base + block[0] == address), None)
            args.append((elements, 4 * span if place == "COPIED" else None, block if place == "PATH" else None))
        model = self.nodes[node] = predict(spec, pool, args, in_use)
        found = {slot.leaves: slot.address - base for slot in node.slots}
        expected = {leaves: block[0] for leaves, block in model.blocks.items()}
        if found != expected:
            raise Wrong(f"results are at {found}, the model puts them at {expected}")
        if node.pool.reserved_bytes != pool.extent:
            raise Wrong(f"the pool holds {node.pool.reserved_bytes} bytes, the model needs {pool.extent}")


def overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two (offset, size) share a byte."""
    return a[0] < b[0] + b[1] and b[0] < a[0] + a[1]


def random_world(seed: int, device: str) -> World:
    """A device with a few callables."""
    rng = random.Random(seed)
    driver = CudaDriver() if device == "cuda" else SimulatedDriver(capacity=1 << 20, granularity=GRANULARITY)
    options = TreeOptions(
        outputs=rng.choice(["survive", "survive", "survive", "copy"]),
        patience=rng.choice([0, 1, 2]),
        max_rerecords=rng.choice([2, 128]),
        max_static_variants=rng.choice([1, 64]),
        max_path=rng.choice([3, 64]),
        max_sizes=rng.choice([2, 64]),
    )
    trees = CudagraphTrees(driver, options)
    specs = [random_spec(rng) for _ in range(rng.randint(1, 3))]
    world = World(rng, driver, trees, specs, rng.choice([(100,), (300,), (5, 1000)]), [], [])
    trees._observer, world.device = world, device
    for spec in specs:
        weights = [world.randn(rng.choice(SIZES) + 1)[rng.random() < 0.2 :] for _ in range(spec.weights)]
        world.weights.append([Held(weight, weight.clone()) for weight in weights])

        def fn(args: list, spec: Spec = spec) -> list:
            return run_spec(spec, args)

        fn._boxed_call = True
        static = range(spec.inputs, spec.inputs + spec.weights)
        world.functions.append(trees.wrap(fn, static_input_indices=list(static), training=spec.training))
    return world


def random_input(world: World, which: int, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """A new tensor, one that the program holds, or one of the callable's weights; with its twin."""
    if world.weights[which] and rng.random() < 0.1:
        weight = world.weights[which][0]
        return weight.real[:3], weight.plain[:3]
    if world.held and rng.random() < 0.6:
        chosen = world.held[-1 - rng.randrange(min(3, len(world.held)))]
        if rng.random() < 0.6:
            world.held.remove(chosen)
        return chosen.real, chosen.plain
    made = world.randn(2 * rng.choice(world.sizes))
    made = made[::2] if rng.random() < 0.2 else made[: made.numel() // 2]
    return made, made.clone() if made.is_contiguous() else made.repeat_interleave(2)[::2]


def do_call(world: World, rng: random.Random) -> None:
    """Call something; keep some of its results. `rng` decides, so that a call can be made again."""
    which = rng.randrange(len(world.specs))
    spec, seed = world.specs[which], world.rng.getrandbits(30)
    pairs = [random_input(world, which, rng) for _ in range(spec.inputs)]
    pairs += [(held.real, held.plain) for held in world.weights[which]]
    scale = rng.choice([1, 1, 1, 2])
    real, plain = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    spans = [(x.numel(), 1 + (x.numel() - 1) * x.stride(0), x.untyped_storage().data_ptr()) for x in real]
    world.call = (spec, spans)
    del pairs
    world.seed(seed)
    real.append(scale)
    got = world.functions[which](real)
    world.seed(seed)
    expected = run_spec(spec, [*plain, scale])
    check_aliasing(got, expected, plain)
    results = [Held(a, b) for a, b in zip(got, expected, strict=True) if a is not None]
    for a, b in zip(got, expected, strict=True):
        if (a is None) != (b is None):
            raise Wrong("a result is missing")
    if results and spec.training and rng.random() < 0.5:
        accumulate(world, results.pop())
    chance = rng.choice([0, 0.3, 1]) if world.rng.random() < 0.8 else 1
    world.held += [held for held in results if rng.random() < chance]


def check_aliasing(got: list, expected: list, plain: list) -> None:
    """Results share memory with each other where the plain ones do."""
    del plain
    for i, a in enumerate(got):
        for j in range(i):
            if a is None or got[j] is None:
                continue
            shared = a.untyped_storage().data_ptr() == got[j].untyped_storage().data_ptr()
            if shared != (expected[i].untyped_storage().data_ptr() == expected[j].untyped_storage().data_ptr()):
                raise Wrong(f"results {j} and {i} share memory: {shared}")


def accumulate(world: World, grad: Held) -> None:
    """As autograd does: take the first gradient as it is, add later ones to it."""
    for known in world.grads:
        if known.real.shape == grad.real.shape and known.real.data_ptr() != grad.real.data_ptr():
            known.real.add_(grad.real)
            known.plain.add_(grad.plain)
            return
    world.grads.append(grad)


def do_thing(world: World, rng: random.Random) -> None:
    """One action that is no call."""
    match rng.choice(["drop", "drop", "drop all", "drop all", "write", "view", "mark", "weight", "zero grad"]):
        case "drop" if world.held:
            world.held.remove(rng.choice(world.held))
        case "drop all":
            world.held.clear()
        case "write" if world.held:
            chosen = rng.choice(world.held)
            chosen.real.mul_(0.5)
            chosen.plain.mul_(0.5)
        case "view" if world.held:
            chosen = rng.choice(world.held)
            world.held.append(Held(chosen.real[:1], chosen.plain[:1]))
        case "mark" if rng.random() < 0.2:
            world.trees.mark_step()
        case "weight":
            weights = rng.choice(world.weights)
            if weights:
                chosen = rng.choice(weights)
                world.retired.append(chosen.real)  # alive, so that no other tensor gets its address
                chosen.real = chosen.real * -0.5
                chosen.plain = chosen.real.clone()
        case "zero grad":
            world.grads.clear()


def check(world: World) -> None:
    """All that the program holds equals its twin, bit for bit."""
    everything = [*world.held, *world.grads, *(held for weights in world.weights for held in weights)]
    for held in everything:
        if held.real.shape != held.plain.shape or not same_bits(held.real, held.plain):
            raise Wrong(f"a result of {held.plain.numel()} elements differs from the plain run")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN included."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def check_end(world: World) -> None:
    """When the program lets go of everything, nothing is in use."""
    world.held.clear()
    world.grads.clear()
    world.call = ()
    if any(pool.live_bytes for manager in world.trees._managers.values() for pool in manager.pools):
        gc.collect()
    for manager in list(world.trees._managers.values()):
        for pool in manager.pools:
            if pool.live_bytes or world.driver.live_blocks(pool.handle):
                raise Wrong(f"{pool.live_bytes} bytes of results stay in use")
    report = world.trees.report()
    added = sum(info.added_bytes for info in report.recordings) + sum(info.dropped_bytes for info in report.pools)
    if added != report.pool_bytes:
        raise Wrong(f"the report's recordings add up to {added} bytes of {report.pool_bytes}")


def run_program(seed: int, rounds: int = 10, device: str = "cpu") -> World:
    """Run one random program: a few actions, again and again, with something else now and then.

    Raises `Wrong`, or an error of the simulated device.
    """
    world = random_world(seed, device)
    rng = world.rng
    routine = [(rng.random() < 0.85, rng.getrandbits(30)) for _ in range(rng.randint(1, 6))]
    tidy = rng.choice([1, 1, 0.9, 0.5])  # how often it lets go of everything at the end of a round
    marks = rng.random() < 0.6
    errors: list[BaseException] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CudagraphNotice)
        for _ in range(rounds):
            if marks:
                world.trees.mark_step()
            for is_call, choice in routine:
                if rng.random() < 0.05:
                    is_call, choice = rng.random() < 0.5, rng.getrandbits(30)
                action = do_call if is_call else do_thing
                if rng.random() < 0.01:
                    in_thread(action, world, random.Random(choice), errors)
                else:
                    action(world, random.Random(choice))
                check(world)
            if rng.random() < tidy:
                world.held.clear()
        if errors:
            raise errors[0]
        check_end(world)
    return world


def in_thread(action, world: World, rng: random.Random, errors: list[BaseException]) -> None:
    """Do it in another thread, which then ends; its results stay."""

    def work() -> None:
        try:
            for _ in range(4):
                action(world, rng)
        except Exception as error:  # noqa: BLE001 - raised again by the main thread
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: the simulated device")
    options = parser.parse_args()
    began, replays, recordings, calls = time.monotonic(), 0, 0, 0
    for seed in range(options.seed, options.seed + options.programs):
        try:
            world = run_program(seed, device=options.device)
        except Exception as error:
            print(f"program {seed}: {type(error).__name__}: {error}")
            raise
        functions = world.trees.report().functions
        recordings += world.recordings
        replays += sum(info.replays for info in functions)
        calls += sum(info.replays + info.warm_ups + info.blocked + info.uncaptured for info in functions)
    seconds = time.monotonic() - began
    print(f"{options.programs} programs, {calls} calls, {recordings} recordings, {replays} replays in {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
