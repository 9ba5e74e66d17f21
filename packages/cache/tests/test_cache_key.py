"""Keys: injective, order-free, and able to say why they differ."""

import enum
import itertools
from dataclasses import dataclass, field

import pytest
import torch

from aotkit_cache import CacheKey, Uncacheable, environment_parts, explain, make_key


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


@dataclass(frozen=True)
class Options:
    level: int = 2
    mode: Mode = Mode.FAST
    label: str = field(default="", compare=False)


# Pairwise different values: no two may give the same key.
DISTINCT = [
    None, True, False, 0, 1, -1, 1.0, 0.0, -0.0, float("nan"), float("inf"), 1e-45, "", "1", "true", "null",
    "1.0", b"", b"1", [], (), {}, set(), [1], (1,), {1}, ["1"], [[1]], [1, 2], [2, 1], (1, 2), {1: 2}, {"1": 2},
    {"a": None}, [None], {"tuple": [1]}, {"set": [1]}, {"float": "1.0"}, {"bytes": "x"}, {"object": "x"}, 1j,
    2**80, "\U0001f600", "\ud83d\ude00", "a\nb", "a\\nb", torch.float32, torch.float64, "torch.float32",
    torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda"), torch.strided, torch.channels_last,
    Mode.FAST, Mode.EXACT, Options(), Options(level=3), Options(mode=Mode.EXACT),
]  # fmt: skip


@pytest.mark.covers("F7.4")
def test_different_values_never_share_a_key():
    digests = [make_key(value=value).digest for value in DISTINCT]
    clashes = [
        (DISTINCT[i], DISTINCT[j])
        for i, j in itertools.combinations(range(len(digests)), 2)
        if digests[i] == digests[j]
    ]
    assert clashes == []


@pytest.mark.covers("F7.4")
def test_order_of_parts_and_of_unordered_values_does_not_matter():
    a = make_key(x=1, y={"p": 1, "q": 2}, z={3, 1, 2})
    b = make_key(z={2, 3, 1}, y={"q": 2, "p": 1}, x=1)
    assert a == b and a.digest == b.digest and hash(a) == hash(b)


def test_part_boundaries_cannot_be_shifted():
    assert make_key(a="x", b="y").digest != make_key(a="xb", y="").digest
    assert make_key(ab="c").digest != make_key(a="bc").digest


def test_fields_left_out_of_comparison_are_left_out_of_the_key():
    assert make_key(o=Options(label="p")).digest == make_key(o=Options(label="q")).digest


def test_torch_size_equals_the_tuple_it_is():
    assert make_key(shape=torch.Size([2, 3])) == make_key(shape=(2, 3))


@pytest.mark.covers("F7.11")
@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        lambda: 0,
        object(),
        torch.nn.Linear(2, 2),
        range(3),
        type("S", (str,), {})("x"),
        int,
        {"deep": [{"er": object()}]},
    ],
)
def test_values_without_canonical_text_are_refused_by_name(value):
    with pytest.raises(Uncacheable, match="key part thing") as caught:
        make_key(thing=value)
    assert "canonical text" in caught.value.reason


def test_the_refusal_names_the_place_inside_the_part():
    with pytest.raises(Uncacheable, match=r"key part inputs\[1\]\['hook'\] is a builtins.function"):
        make_key(inputs=[1, {"hook": lambda: 0}])


def test_a_value_that_contains_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(Uncacheable, match="nested more than"):
        make_key(loop=loop)


def test_a_key_round_trips_through_json():
    key = make_key(graph="a\nb", shape=(1, 2), odd="\ud800")
    assert CacheKey.from_json(key.to_json()) == key
    assert CacheKey.from_json(key.to_json()).digest == key.digest


def test_a_part_name_may_occur_once_only():
    with pytest.raises(ValueError, match="'a' occurs more than once"):
        CacheKey((("a", "1"), ("b", "1"), ("a", "2")))


@pytest.mark.covers("F7.30")
def test_explain_names_the_nested_value_with_both_values():
    def key(stride):
        return make_key(inputs=[{"shape": (8, 128), "stride": s} for s in ((128, 1), stride)], opt=1)

    assert explain(key((128, 1)), key((256, 1))) == "the keys differ in 1 place:\n  inputs[1]['stride'][0]: 128 -> 256"


@pytest.mark.covers("F7.30")
def test_explain_names_options_fields_and_missing_parts():
    text = explain(make_key(o=Options(), only_a=1), make_key(o=Options(level=3, mode=Mode.EXACT), only_b=(2,)))
    assert text.startswith("the keys differ in 4 places:")
    assert "o.level: 2 -> 3" in text
    assert "o.mode:" in text and "FAST" in text and "EXACT" in text
    assert "only_a: only in the first key (1)" in text
    assert "only_b: only in the second key ((2,))" in text


@pytest.mark.covers("F7.30")
def test_explain_shows_the_first_differing_line_of_a_long_text():
    lines = [f"%{i} = op(%{i - 1})" for i in range(1000)]
    old = "\n".join(lines)
    lines[700] = "%700 = other(%699)"
    text = explain(make_key(graph=old), make_key(graph="\n".join(lines)))
    assert "graph, line 701: '%700 = op(%699)' -> '%700 = other(%699)'" in text
    assert len(text) < 300


def test_explain_says_that_equal_keys_are_equal():
    assert explain(make_key(a=1), make_key(a=1)) == "the keys are equal"


def test_explain_finds_every_difference_between_distinct_values():
    for a, b in itertools.combinations(DISTINCT, 2):
        assert "differ in" in explain(make_key(v=a), make_key(v=b)), (a, b)


@pytest.mark.covers("F7.7")
def test_environment_parts_name_torch_python_and_machine():
    parts = environment_parts()
    assert torch.__version__ in parts["env.torch"]
    assert set(parts) == {"env.torch", "env.python", "env.system", "env.cpu_capability"}
    assert make_key(**parts).digest == make_key(**environment_parts()).digest
