"""Models of diffusers on a CUDA device, resident and streamed: the bits of the plain ones there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
pytest.importorskip("accelerate", reason="needs accelerate")

from tpde import pack  # noqa: E402
from tpde.errors import OutOfMemory, PackedWeight  # noqa: E402
from tpde.integrations.diffusers import load  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a UNet of 85 MB, plain and packed."""
    base = tmp_path_factory.mktemp("unet")
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=16,
        block_out_channels=(128, 256, 512),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    model.to(torch.bfloat16).save_pretrained(base / "plain")
    pack(base / "plain", base / "packed")
    return base


def run(model: Any) -> Any:
    noise = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    with torch.no_grad():
        return model(noise, 10).sample.view(torch.int16).cpu()


@pytest.mark.parametrize("options", [{}, {"vram": "300MiB", "activations": "16MiB"}], ids=["packed", "vram"])
def test_the_plain_models_bits(folder: Path, options: dict[str, Any]) -> None:
    plain = diffusers.UNet2DModel.from_pretrained(folder / "plain", torch_dtype=torch.bfloat16).cuda()
    expected = run(plain)
    model = load(diffusers.UNet2DModel, folder / "packed", device="cuda", **options)
    for _ in range(3):
        assert torch.equal(run(model), expected)
    if options:
        (streamer,) = model.tpde_streamer.streamers.values()
        assert streamer.ring.copied_pieces > 0
        with pytest.raises(PackedWeight):
            model.to("cpu")
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")  # others come on top
        model.tpde_streamer.close()


def test_a_budget_that_cannot_work(folder: Path) -> None:
    with pytest.raises(OutOfMemory, match="the least that works"):
        load(diffusers.UNet2DModel, folder / "packed", device="cuda", vram="32MiB", activations="1MiB")
