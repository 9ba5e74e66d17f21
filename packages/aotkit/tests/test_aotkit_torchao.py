"""Linear layers as torchao quantizes them: eager's numbers, of kernels that read nothing but the narrow weights.

The same graphs without torchao are in ``test_inductor_lower_int8_products.py``, ``..._packed_products.py`` and
``..._scaled_groups.py``.
"""

from __future__ import annotations

import warnings

import pytest
import torch

import aotkit
from aotkit_inductor_lower.targets.cpu.products import multiplies_few_bytes
from aotkit_inductor_lower.targets.cpu.target import cpu_target

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what it was built for, and of what torch deprecates
    pytest.importorskip("torchao", reason="torchao is not installed, and nothing of ours needs it")
    from torchao import quantization
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

pytestmark = pytest.mark.filterwarnings("ignore:::torch.*", "ignore:::torchao.*")
CONFIGS = {
    "int8": lambda: quantization.Int8WeightOnlyConfig(),
    "int8, groups": lambda: quantization.Int8WeightOnlyConfig(granularity=quantization.PerGroup(64)),
    "int8, dynamic": lambda: quantization.Int8DynamicActivationInt8WeightConfig(),
    "int4": lambda: PrototypeInt4WeightOnlyConfig(group_size=64, set_inductor_config=False),
    "float8": lambda: quantization.Float8WeightOnlyConfig(),
}
QUANTIZES = {"int8, dynamic": 2}  # kernels: what is largest of each row, and the bytes


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_are_products_that_read_the_narrow_weights(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "0")  # what a dynamic layer of torchao knows has no form that can be kept
    torch.manual_seed(0)
    torch._dynamo.reset()
    layer = torch.nn.Sequential(torch.nn.Linear(512, 256, bias=False)).bfloat16().eval()
    x = torch.randn(rows, 512).bfloat16()
    recorder = aotkit.Recorder()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        true = layer(x).double()
        quantization.quantize_(layer, CONFIGS[name]())
        options = {"fallback": "error", "cache": False, "observer": recorder}
        got, want = torch.compile(layer, backend="aotkit", options=options)(x), layer(x)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-9)
    assert (got.double() - true).norm() <= 1.1 * (want.double() - true).norm()  # what quantizing costs, no more
    (graph,) = recorder.graphs
    machine = cpu_target().machine
    if multiplies_few_bytes(machine) if name == "int8, dynamic" else machine.has("fma") and machine.vector_bits >= 256:
        assert not graph.report.externs and graph.report.kernel_count <= 1 + QUANTIZES.get(name, 0)
