"""The launches of Experts on GPUs, on devices that only record them: their arguments, blocks, order and streams."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import mpicomm
from mpicomm import Experts, InvalidUsageError
from mpicomm.devices.host import array_at
from mpicomm.kernels.team import ABSENT
from mpicomm.kernels.variant import Variant
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.fakes.window_devices import WindowDevice
from tests.helpers.rigs.communicators import communicator
from tests.helpers.rigs.message_rigs import take_for_gpu

HIDDEN, TOP_K, TOKENS = 512, 2, 300


@dataclass
class RecordedLaunch:
    """A launch."""

    entry: str
    arguments: Any
    stream: int
    blocks: int
    options: tuple[str, ...]


class ExpertsDevice(WindowDevice):
    """Records the launches of experts. Fails if a kernel that waits for peers is not loaded beforehand."""

    multiprocessors = 40
    info = SimpleNamespace(compute_capability=(9, 0), uuid=b"")

    def __init__(self, rank: int, timeout_s: float) -> None:
        super().__init__(rank, timeout_s)
        self.launches: list[RecordedLaunch] = []

    def launch(self, variant: Variant, arguments: ctypes.Structure, stream: int, *, blocks: int, threads: int) -> None:
        assert variant in self.loaded and threads > 0
        self.launches.append(
            RecordedLaunch(variant.entry, type(arguments).from_buffer_copy(arguments), stream, blocks, variant.options)
        )

    def of(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array of zeros with a shape, which arrays of CuPy have, too."""
        array: Any = DeviceArray(self, np.zeros(shape, dtype))
        array.shape = shape
        return array


@dataclass
class Rig:
    comm: mpicomm.Communicator
    device: ExpertsDevice

    def dispatch(self, experts: Experts, tokens: int, **options: Any) -> tuple[mpicomm.Received, list[RecordedLaunch]]:
        of, launches = self.device.of, self.device.launches
        x, ids = of((tokens, HIDDEN), np.float32), of((tokens, TOP_K), np.int32)
        launches.clear()
        return experts.dispatch(x, ids, stream=5, **options), list(launches)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with communicator("cpu") as parent:
        comm = parent.Dup()
        device = cast(ExpertsDevice, take_for_gpu(comm, made_by=ExpertsDevice))
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(empty=device.of))
        yield Rig(comm, device)
        comm.Free()


def experts_of(rig: Rig, **options: Any) -> Experts:
    max_tokens = options.pop("max_tokens", TOKENS)
    return Experts(rig.comm, 2 * rig.comm.size, HIDDEN, max_tokens, TOP_K, "float32", **options)


def address(array: Any) -> int:
    pointer: int = array.__cuda_array_interface__["data"][0]
    return pointer


def test_launches_have_the_arrays_of_the_result(rig: Rig) -> None:
    with experts_of(rig, layout="tokens") as experts:
        received, (dispatch,) = rig.dispatch(experts, 4)
        x = dispatch.arguments
        assert (dispatch.entry, dispatch.stream) == ("mpicomm_experts_dispatch", 5)
        names = {
            **{name: name for name in ("counts", "offsets", "sources", "places", "targets", "tokens", "token_rows")},
            "place_weights": "weights",
            "place_rows": "rows",
            "slot_ids": "topk_ids",
            "slot_weights": "topk_weights",
            "row_count": "row_count",
        }
        for field, name in names.items():
            assert getattr(x, field) == address(getattr(received, name)), field
        assert x.rows.first == address(received.x)
        assert (x.capacity, x.all_places) == (rig.comm.size * TOKENS, len(received.rows.memory))
        y = experts.combine(received.x, received, stream=5)
        combine = rig.device.launches[-1]
        assert (combine.entry, combine.stream) == ("mpicomm_experts_combine", 5)
        assert (combine.arguments.token_rows, combine.arguments.output) == (address(received.token_rows), address(y))
    with experts_of(rig) as experts:
        received, (dispatch,) = rig.dispatch(experts, 4)
        experts.combine(received.x, received, weighted=False, stream=5)
        combine = rig.device.launches[-1]
        assert (dispatch.arguments.token_rows, combine.arguments.token_rows, combine.arguments.row_weights) == (0, 0, 0)


@pytest.mark.parametrize("max_tokens", [256, 257])
@pytest.mark.parametrize("layout", ["experts", "tokens"])
def test_rows_travel_in_packets_by_token_if_there_are_never_many(rig: Rig, layout: str, max_tokens: int) -> None:
    in_packets = layout == "tokens" and max_tokens == 256
    with experts_of(rig, layout=layout, max_tokens=max_tokens) as experts:
        received, (dispatch,) = rig.dispatch(experts, 4)
        experts.combine(received.x, received, stream=5)
        combine = rig.device.launches[-1]
        assert dispatch.entry == f"mpicomm_experts_dispatch{'_few' if in_packets else ''}"
        assert ("-DMPICOMM_IN_PACKETS=true" in combine.options) == in_packets
        x = dispatch.arguments.experts
        nbytes = 2 * (x.sums - x.rows)  # rows and sums are alike
        words = array_at(x.team.arenas[x.team.rank] + x.rows, nbytes // 4, np.dtype(np.uint32))
        assert len(words) >= (rig.comm.size - 1) * max_tokens * HIDDEN
        absent = words == ABSENT
        assert absent.all() if in_packets else not absent.any()


@pytest.mark.parametrize("blocks", [None, 2, 7])
def test_blocks_depend_on_the_number_of_tokens_and_stay_below_the_bound(rig: Rig, blocks: int | None) -> None:
    with experts_of(rig, blocks=blocks) as experts:
        for tokens, mode in ((256, " of few"), (257, "")):
            received, (dispatch,) = rig.dispatch(experts, tokens)
            experts.combine(received.x, received, stream=5)
            combine = rig.device.launches[-1]
            assert (dispatch.blocks, combine.blocks) == tuple(
                experts.blocks[name + mode] for name in ("dispatch", "combine")
            )
            for launch in (dispatch, combine):
                assert (
                    0 < launch.arguments.experts.senders < launch.blocks <= (blocks or 2 * rig.device.multiprocessors)
                )


def test_tokens_are_quantized_before_they_leave(rig: Rig) -> None:
    pytest.importorskip("ml_dtypes")
    with experts_of(rig, wire_dtype="float8_e4m3fn") as experts:
        received, (quantize, dispatch) = rig.dispatch(experts, 4)
        assert [quantize.entry, dispatch.entry] == ["mpicomm_experts_quantize", "mpicomm_experts_dispatch"]
        assert quantize.arguments.values == dispatch.arguments.x.first
        assert quantize.arguments.scales == dispatch.arguments.x.second
        assert dispatch.arguments.rows.second == address(received.scales)


def test_arrays_of_one_call_lie_in_one_place(rig: Rig) -> None:
    with experts_of(rig) as experts:
        x, ids = rig.device.of((4, HIDDEN), np.float32), np.zeros((4, TOP_K), np.int64)
        with pytest.raises(
            InvalidUsageError, match="topk_ids is in host memory, and another array of the call in a GPU"
        ):
            experts.dispatch(x, ids)
        received, _ = rig.dispatch(experts, 4)
        with pytest.raises(InvalidUsageError, match=r"z has shape \(4, 512\): pass one of shape"):
            experts.combine(x, received)
