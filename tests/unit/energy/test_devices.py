"""Devices: what can be set, what can be read, and what is said where it cannot."""

import math
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from partita.core.cluster import Dvfs
from partita.core.energy import EnergyOrigin
from partita.core.program import Kind
from partita.energy.client.counter import ExactCounter, PolledCounter, Stamp, open_counter
from partita.energy.devices.gpus import NvmlDevice, ZeusDevice
from partita.energy.devices.modelled import ModelledDevice, SlowSpell
from partita.energy.devices.protocol import PowerDevice, WorkingDevice
from partita.energy.devices.rapl import RaplDevice
from partita.energy.devices.replay import ReplayDevice
from partita.energy.devices.table import DEVICES, NullDevice, open_device
from partita.energy.frontier.modelled import DvfsCurve
from partita.errors import FormatError, InvalidInputError, UnsupportedError
from partita.formats.perseus import write_energy_log

CURVE = DvfsCurve(clocks_mhz=(1400, 1000, 700), idle_w=50.0, max_w=400.0)
BLOCKING_W = 50 + 0.15 * 350


class Time:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def modelled(**options) -> tuple[ModelledDevice, Time]:
    clock = Time()
    return ModelledDevice(CURVE, clock=clock, **options), clock


def test_a_modelled_gpu_integrates_its_power() -> None:
    device, clock = modelled()
    assert device.energy_j() == 0
    clock.now += 2.0
    assert device.energy_j() == pytest.approx(2 * BLOCKING_W)
    took = device.begin_work(1.0, Kind.FORWARD)
    assert took == 1.0
    clock.now += 0.5
    assert device.energy_j() == pytest.approx(2 * BLOCKING_W + 0.5 * 400)
    clock.now += 1.5
    assert device.energy_j() == pytest.approx(2 * BLOCKING_W + 400 + BLOCKING_W)


def test_a_modelled_gpu_is_slower_and_cheaper_at_a_lower_clock() -> None:
    device, clock = modelled()
    device.set_clock(1000)
    device.set_clock(0)
    assert device.clock_mhz == 1000
    before = device.energy_j()
    took = device.begin_work(1.0, Kind.BACKWARD)
    clock.now += took
    used = device.energy_j() - before
    share = CURVE.dvfs.fixed_backward
    assert took == pytest.approx(share + (1 - share) * 1.4)
    assert used == pytest.approx(took * CURVE.power_w(Kind.BACKWARD, 1000))
    assert used < 0.8 * 400
    device.reset()
    assert device.clock_mhz == 1400


def test_loading_does_not_depend_on_the_clock() -> None:
    device, _ = modelled()
    device.set_clock(700)
    assert device.begin_work(1.0, Kind.LOAD) == 1.0


def test_work_may_begin_by_the_clock_of_the_device() -> None:
    device, clock = modelled()
    device.energy_j()
    device.begin_work(1.0, Kind.FORWARD, begin_s=101.0)
    clock.now = 103.0
    assert device.energy_j() == pytest.approx(2 * BLOCKING_W + 400)


def test_noise_is_seeded_and_each_rank_has_its_own() -> None:
    def times(**options) -> list[float]:
        device, _ = modelled(noise=0.02, **options)
        return [device.begin_work(1.0, Kind.FORWARD) for _ in range(200)]

    first = times(seed=1)
    assert first == times(seed=1)
    assert first != times(seed=2)
    assert first != times(seed=1, rank=1)
    assert abs(sum(first) / 200 - 1) < 0.01
    assert all(abs(time - 1) <= 0.0601 for time in first)
    with pytest.raises(InvalidInputError, match=r"noise is 0\.5"):
        modelled(noise=0.5)


def test_a_slow_spell_makes_one_rank_slower_for_some_steps() -> None:
    spell = SlowSpell.parse("1.5@step2-3:rank1")
    assert spell == SlowSpell(1.5, 2, 3, 1)
    device, _ = modelled(rank=1, slow=spell)
    times = []
    for step in range(5):
        device.begin_step(step)
        times.append(device.begin_work(1.0, Kind.FORWARD))
    assert times == [1.0, 1.0, 1.5, 1.5, 1.0]
    device, clock = modelled(slow=SlowSpell(2.0, 0))
    device.energy_j()
    clock.now += device.begin_work(1.0, Kind.FORWARD)
    assert device.energy_j() == pytest.approx(400 + BLOCKING_W)
    assert SlowSpell.parse("2@step0").factor_at(7, rank=3) == 2
    assert spell.factor_at(2, rank=0) == 1
    for text in ("1.5", "0.5@step1", "2@20", "x@step1"):
        with pytest.raises(InvalidInputError, match=r"like 1\.5@step20"):
            SlowSpell.parse(text)


def test_above_the_throttling_clock_time_does_not_fall_and_power_stays() -> None:
    curve = DvfsCurve(clocks_mhz=(1400, 1300, 1200, 1000), idle_w=50, max_w=400, throttle_mhz=1200)
    lengths = [curve.stretch(Kind.FORWARD, clock) for clock in curve.clocks_mhz]
    powers = [curve.power_w(Kind.FORWARD, clock) for clock in curve.clocks_mhz]
    assert lengths[:3] == [1.0, 1.0, 1.0]
    assert lengths[3] > 1
    assert powers[0] == powers[1] == powers[2] > powers[3]


def test_a_board_throttles_where_it_reaches_its_power_limit() -> None:
    free = DvfsCurve(clocks_mhz=(1400, 1200, 1000), idle_w=50, max_w=600, dvfs=Dvfs(full_w=500))
    assert free.kept_mhz == 1400
    assert free.power_w(Kind.FORWARD, 1400) == 500
    limit_w = free.power_w(Kind.BACKWARD, 1200)
    held = replace(free, max_w=limit_w)
    assert held.kept_mhz == pytest.approx(1200)
    assert held.power_w(Kind.FORWARD, 1400) == pytest.approx(limit_w)
    assert held.power_w(Kind.FORWARD, 1000) == free.power_w(Kind.FORWARD, 1000)
    assert held.stretch(Kind.FORWARD, 1200) == pytest.approx(1.0)
    longer = free.stretch(Kind.FORWARD, 1000) / free.stretch(Kind.FORWARD, 1200)
    assert held.stretch(Kind.FORWARD, 1000) == pytest.approx(longer)


def test_below_the_knee_the_voltage_stays_and_power_falls_with_the_clock() -> None:
    dvfs = Dvfs(static_share=0.2, knee=0.5, floor_voltage=0.8)
    curve = DvfsCurve(clocks_mhz=(1000, 750, 500, 250), idle_w=1, max_w=100, dvfs=dvfs)
    expected = [100, 20 + 80 * 0.75 * 0.9**2, 20 + 80 * 0.5 * 0.8**2, 20 + 80 * 0.25 * 0.8**2]
    powers = [curve.power_w(Kind.FORWARD, clock) for clock in curve.clocks_mhz]
    assert powers == pytest.approx(expected)


def test_devices_refuse_figures_that_make_no_sense() -> None:
    with pytest.raises(InvalidInputError, match="highest first"):
        DvfsCurve(clocks_mhz=(700, 1400), idle_w=50, max_w=400)
    with pytest.raises(InvalidInputError, match="at most"):
        DvfsCurve(clocks_mhz=(1400,), idle_w=400, max_w=400)
    with pytest.raises(InvalidInputError, match="throttle is 1500"):
        DvfsCurve(clocks_mhz=(1400, 700), idle_w=50, max_w=400, throttle_mhz=1500)
    with pytest.raises(InvalidInputError, match=r"1234 MHz.*3 clocks"):
        modelled()[0].set_clock(1234)


def rapl_tree(root: Path, *, dram: bool = True) -> Path:
    zone = root / "intel-rapl:0"
    zones = {zone: "package-0"}
    if dram:
        zones[zone / "intel-rapl:0:0"] = "dram"
        zones[zone / "intel-rapl:0:1"] = "core"
    zones[root / "intel-rapl:1"] = "psys"
    for folder, name in zones.items():
        folder.mkdir(parents=True)
        (folder / "name").write_text(name + "\n")
        (folder / "energy_uj").write_text("1000000\n")
        (folder / "max_energy_range_uj").write_text("5000000\n")
    return zone


def test_rapl_adds_package_and_memory_and_survives_the_end_of_its_range(tmp_path: Path) -> None:
    zone = rapl_tree(tmp_path)
    device = RaplDevice(0, tmp_path)
    assert device.energy_j() == 0
    (zone / "energy_uj").write_text("3000000\n")
    (zone / "intel-rapl:0:0" / "energy_uj").write_text("1500000\n")
    (zone / "intel-rapl:0:1" / "energy_uj").write_text("4000000\n")
    assert device.energy_j() == pytest.approx(2.5)
    (zone / "energy_uj").write_text("499999\n")
    assert device.energy_j() == pytest.approx(2.5 + 2.5)
    device.set_clock(0)
    device.reset()
    with pytest.raises(UnsupportedError, match="CPUs"):
        device.set_clock(2000)


def test_rapl_says_which_file_may_not_be_read(tmp_path: Path, monkeypatch) -> None:
    zone = rapl_tree(tmp_path, dram=False)
    real = Path.read_text

    def guarded(path: Path, *args, **kwargs) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", guarded)
    with pytest.raises(UnsupportedError, match=f"no permission to read {zone / 'energy_uj'}"):
        RaplDevice(0, tmp_path)


def test_rapl_says_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no RAPL counter"):
        RaplDevice(0, tmp_path)
    zone = rapl_tree(tmp_path, dram=False)
    with pytest.raises(UnsupportedError, match=r"CPU.*1,.*1"):
        RaplDevice(1, tmp_path)
    (zone / "energy_uj").write_text("nonsense")
    with pytest.raises(UnsupportedError, match="cannot be read"):
        RaplDevice(0, tmp_path)


class FakeNvml(types.ModuleType):
    """As much of pynvml as is used."""

    class NVMLError(Exception):
        pass

    class NVMLError_NoPermission(NVMLError):  # noqa: N801, N818 (pynvml's name)
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801, N818 (likewise)
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.locked: list[tuple[object, object]] = []
        self.may_set = True
        self.millijoules = 2500.0

    def nvmlInit(self) -> None:  # noqa: N802 (likewise)
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802 (likewise)
        if index > 3:
            raise self.NVMLError("Invalid Argument")
        return f"board{index}"

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:  # noqa: N802 (likewise)
        return name

    def nvmlDeviceGetSupportedMemoryClocks(self, board: str) -> list[int]:  # noqa: N802 (likewise)
        if board == "board3":
            raise self.NVMLError_NotSupported
        return [1593, 810]

    def nvmlDeviceGetSupportedGraphicsClocks(self, board: str, memory: int) -> list[int]:  # noqa: N802
        assert memory == 1593
        return [1395, 1410, 210]

    def nvmlDeviceSetGpuLockedClocks(self, board: str, low: int, high: int) -> None:  # noqa: N802
        if not self.may_set:
            raise self.NVMLError_NoPermission
        assert low == high
        self.locked.append((board, low))

    def nvmlDeviceResetGpuLockedClocks(self, board: str) -> None:  # noqa: N802 (likewise)
        self.locked.append((board, None))

    def nvmlDeviceGetTotalEnergyConsumption(self, board: str) -> float:  # noqa: N802 (likewise)
        if math.isnan(self.millijoules):
            raise self.NVMLError_NotSupported
        return self.millijoules


@pytest.fixture
def nvml(monkeypatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_nvml_locks_clocks_and_reads_joules(nvml: FakeNvml) -> None:
    device = open_device("nvml", 1)
    assert isinstance(device, NvmlDevice)
    assert device.clocks_mhz == (1410, 1395, 210)
    assert device.energy_j() == 2.5
    device.reset()
    device.set_clock(0)
    assert nvml.locked == []
    device.set_clock(1395)
    device.reset()
    assert nvml.locked == [("board1", 1395), ("board1", None)]
    nvml.millijoules = math.nan
    assert device.energy_j() is None


def test_nvml_names_the_permission_that_is_missing(nvml: FakeNvml) -> None:
    nvml.may_set = False
    with pytest.raises(UnsupportedError, match=r"gpu0: no permission.*CAP_SYS_ADMIN.*zeusd"):
        NvmlDevice(0).set_clock(210)


def test_nvml_counts_as_cuda_does(nvml: FakeNvml, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-aa")
    for index, board in ((0, "board2"), (1, "GPU-aa")):
        NvmlDevice(index).set_clock(210)
        assert nvml.locked[-1] == (board, 210)
    with pytest.raises(UnsupportedError, match="CUDA_VISIBLE_DEVICES shows 2"):
        NvmlDevice(2)


def test_nvml_says_what_is_not_there(nvml: FakeNvml, monkeypatch) -> None:
    assert NvmlDevice(3).clocks_mhz == ()
    with pytest.raises(UnsupportedError, match="gpu4 cannot be opened: Invalid Argument"):
        NvmlDevice(4)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UnsupportedError, match=r"install partita\[energy\]"):
        NvmlDevice(0)


class FakeGpus:
    """As much of zeus's GPUs as is used."""

    class ZeusGPUNoPermissionError(Exception):
        pass

    def __init__(self) -> None:
        self.locked: list[object] = []
        self.may_set = True

    def __len__(self) -> int:
        return 2

    def get_supported_graphics_clocks(self, index: int) -> list[int]:
        if index == 1:
            raise RuntimeError("not supported")
        return [210, 1410]

    def set_gpu_locked_clocks(self, index: int, low: int, high: int, *, block: bool) -> None:
        if not self.may_set:
            raise self.ZeusGPUNoPermissionError
        self.locked.append((index, low, high, block))

    def reset_gpu_locked_clocks(self, index: int) -> None:
        self.locked.append(index)

    def get_total_energy_consumption(self, index: int) -> int:
        if index == 1:
            raise RuntimeError("not supported")
        return 1500


def test_zeus_devices(monkeypatch) -> None:
    gpus = FakeGpus()
    module = types.ModuleType("zeus.device")
    module.get_gpus = lambda: gpus
    monkeypatch.setitem(sys.modules, "zeus", types.ModuleType("zeus"))
    monkeypatch.setitem(sys.modules, "zeus.device", module)
    device = open_device("zeus", 0)
    assert isinstance(device, ZeusDevice)
    assert device.clocks_mhz == (1410, 210)
    assert device.energy_j() == 1.5
    device.set_clock(0)
    device.set_clock(210)
    device.reset()
    device.reset()
    assert gpus.locked == [(0, 210, 210, False), 0]
    other = ZeusDevice(1)
    assert (other.clocks_mhz, other.energy_j()) == ((), None)
    gpus.may_set = False
    with pytest.raises(UnsupportedError, match="CAP_SYS_ADMIN"):
        device.set_clock(1410)
    with pytest.raises(UnsupportedError, match="no GPU 2: zeus sees 2"):
        ZeusDevice(2)
    module.get_gpus = lambda: 1 / 0
    with pytest.raises(UnsupportedError, match="zeus finds no GPU"):
        ZeusDevice(0)


def test_replay_says_again_what_a_counter_said(tmp_path: Path) -> None:
    (tmp_path / "time-energy-1.csv").write_text("time,energy\n10,100\n11,150\n13,350\n")
    (tmp_path / "instructions-1.csv").write_text(
        "instruction,start,end,clock\nforward_microstep,10.5,11,1410\nbackward_microstep,11,12,900\n"
    )
    clock = Time()
    device = ReplayDevice(tmp_path, 1, clock=clock)
    assert device.energy_j() == 0
    assert device.clock_mhz is None
    clock.now += 2
    assert device.energy_j() == pytest.approx(150)
    assert device.clock_mhz == 900
    clock.now += 1.5
    assert device.energy_j() is None
    device.set_clock(0)
    device.reset()
    with pytest.raises(UnsupportedError, match=r"record.*clocks"):
        device.set_clock(900)


def test_the_record_of_a_modelled_device_stays_modelled(tmp_path: Path) -> None:
    for modelled_log, origin in ((True, EnergyOrigin.MODELLED), (False, EnergyOrigin.MEASURED)):
        file = tmp_path / "log.csv"
        file.write_text(write_energy_log([1.0, 2.0], [0.0, 5.0], modelled=modelled_log))
        assert ReplayDevice(file).origin is origin


def test_replay_names_the_line_that_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text("time,energy\n10,100\n9,150\n")
    with pytest.raises(FormatError, match=r"log\.csv:3"):
        ReplayDevice(file)
    with pytest.raises(FormatError, match=r"time-energy-0\.csv"):
        open_device(f"replay:{tmp_path}")


def test_the_table_opens_devices_by_name(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    device = open_device("modelled:A100,noise=0.01,seed=1,throttle=1350,step=300", 0, rank=3)
    assert device.name == "modelled-a100:3"
    assert (device.type, device.origin) == ("a100", EnergyOrigin.MODELLED)
    assert device.clocks_mhz == (1410, 1110, 810, 510, 210)
    assert isinstance(device, WorkingDevice)
    nothing: PowerDevice = open_device("none", 2)
    assert isinstance(nothing, NullDevice)
    assert nothing.energy_j() is None
    assert not isinstance(nothing, WorkingDevice)
    for spec, why in {
        "gpu": f"there are {', '.join(DEVICES)}",
        "modelled:": "needs a type of the catalogue",
        "modelled:z9000": "not in the catalogue",
        "modelled:a100,speed=2": "option 'speed' of a modelled device is not known",
        "modelled:a100,seed=1,seed=2": "stands twice",
        "modelled:a100,noise=much": "noise of a modelled device is 'much'",
        "none:1": "takes nothing after it",
        "replay:": "needs its log",
    }.items():
        with pytest.raises(InvalidInputError, match=why):
            open_device(spec)


def test_auto_takes_what_is_there(nvml: FakeNvml, monkeypatch) -> None:
    assert isinstance(open_device("auto", 1), NvmlDevice)
    for name in ("nvml", "zeus", "rapl"):

        def missing(text: str, index: int, rank: int) -> PowerDevice:
            raise UnsupportedError("not here")

        monkeypatch.setitem(DEVICES, name, missing)
    assert isinstance(open_device("auto", 1), NullDevice)


class Stepping:
    """A counter that changes every 0.1 s."""

    def __init__(self, clock: Time) -> None:
        self._clock, self.resolution_s = clock, 0.1

    def energy_j(self) -> float:
        return math.floor(self._clock.now * 10 + 1e-9) * 30.0


def test_a_polled_counter_reads_between_its_changes() -> None:
    clock = Time()
    device = Stepping(clock)
    counter = PolledCounter(device, clock, keep_log=True, poll_s=60.0)
    for _ in range(100):
        clock.now += 0.01
        counter._note()
    assert len(counter.readings) == 11
    assert counter.used_j(Stamp(100.2), Stamp(100.7)) == pytest.approx(150, rel=0.01)
    assert counter.used_j(Stamp(100.2), Stamp(100.25)) is None
    assert counter.used_j(Stamp(100.9), Stamp(101.5)) is None
    assert counter.used_j(Stamp(99.0), Stamp(100.5)) is None
    device.resolution_s = 0.0
    counter.close()


def test_an_exact_counter_is_read_when_asked() -> None:
    device, clock = modelled()
    counter = open_counter(device, clock, keep_log=True)
    assert isinstance(counter, ExactCounter)
    begin = counter.stamp()
    clock.now += 1
    end = counter.stamp()
    assert counter.used_j(begin, end) == pytest.approx(BLOCKING_W)
    assert counter.readings == [(100.0, 0.0), (101.0, pytest.approx(BLOCKING_W))]
    unknown = open_counter(NullDevice(), clock, keep_log=True)
    assert unknown.used_j(unknown.stamp(), unknown.stamp()) is None
    assert unknown.readings == []
