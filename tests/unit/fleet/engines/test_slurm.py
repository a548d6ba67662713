"""The Slurm engine without a Slurm: what it submits, and what ends mean."""

import numpy as np
import pytest

from partita.fleet.engines.protocol import Attempt, Cause, EngineAwayError, Order, Place
from partita.fleet.engines.slurm import SlurmEngine, SlurmOptions
from partita.fleet.policies.resources import Servers
from partita.slurm.commands import SlurmCommands, SlurmError

NODES = "".join(
    f"NodeName={name} CPUTot=8 RealMemory=100000 Gres=gpu:v100:4 State={state} Partitions=main\n"
    for name, state in (("gpu10", "IDLE"), ("gpu2", "DOWN*"))
)


class ReplayedCommands(SlurmCommands):
    """Answers as told, and keeps what was asked."""

    def __init__(self, jobs: str = "") -> None:
        super().__init__({})
        self.jobs = jobs
        self.fails: SlurmError | None = None
        self.asked: list[tuple[str, ...]] = []
        self.script = ""

    def call(self, *words: str, text: str = "") -> str:
        self.calls += 1
        self.asked.append(words)
        if self.fails is not None:
            raise self.fails
        if words[0] == "sbatch":
            self.script = text
            return "41;cluster\n"
        if words[:3] == ("scontrol", "show", "node"):
            return NODES
        if words[0] == "squeue":
            raise SlurmError("squeue: unrecognized option '--json'", is_away=False)
        if words[0] == "sacct":
            raise SlurmError("Slurm accounting storage is disabled", is_away=False)
        return self.jobs


def make(jobs: str = "", **options: object) -> tuple[SlurmEngine, ReplayedCommands]:
    servers = Servers(
        names=("gpu10", "gpu2"),
        gpu_types=("v100",),
        gpu_type=np.zeros(2, dtype=np.int32),
        gpus=np.full(2, 4, dtype=np.int32),
        cpus=np.full(2, 8.0),
        memory_bytes=np.full(2, 100e9),
        storage_bytes_per_s=np.zeros(2),
    )
    commands = ReplayedCommands(jobs)
    return SlurmEngine(servers, SlurmOptions(**options), commands=commands), commands


def order(tmp_path, *places: Place) -> Order:
    return Order(
        fleet="f",
        attempt=Attempt(3, 2),
        command=("python", "train.py", "--name", "it's"),
        folder=tmp_path,
        directory=tmp_path / "job-3",
        environment={"A": "b c"},
        places=places,
    )


def place(server: str, gpus: int, memory_bytes: float = 10e9) -> Place:
    return Place(
        server=server, gpus=tuple(range(gpus)), cpu_ids=(), cpus=2.0, memory_bytes=memory_bytes
    )


def test_hosts_that_get_the_same_are_one_job_others_a_heterogeneous_one(tmp_path) -> None:
    engine, commands = make(partition="gpu", time="1:00:00")
    engine.start(order(tmp_path, place("gpu10", 2), place("gpu2", 2)))
    script = commands.script
    assert "hetjob" not in script
    assert "#SBATCH --nodelist=gpu10,gpu2\n#SBATCH --nodes=2\n" in script
    assert "#SBATCH --gres=gpu:v100:2\n#SBATCH --cpus-per-task=2\n#SBATCH --mem=9536\n" in script
    assert "#SBATCH --partition=gpu\n#SBATCH --time=1:00:00\n" in script
    assert "--signal=B:TERM@60" in script
    assert "--no-requeue" in script
    engine.start(order(tmp_path, place("gpu10", 3), place("gpu2", 1)))
    assert commands.script.count("#SBATCH hetjob") == 1
    assert commands.script.index("--nodelist=gpu10") < commands.script.index("--nodelist=gpu2")
    assert "srun --het-group=0,1" in commands.script
    assert "PARTITA_SERVERS=gpu10,gpu2" in commands.script
    assert "PARTITA_SERVER_GPUS=3,1" in commands.script


def test_memory_without_a_limit_is_the_share_of_the_gpus(tmp_path) -> None:
    engine, commands = make()
    engine.start(order(tmp_path, place("gpu10", 1, memory_bytes=0.0)))
    assert f"#SBATCH --mem={int(25e9 / 2**20)}\n" in commands.script


@pytest.mark.parametrize(
    ("state", "cause", "why"),
    [
        ("NODE_FAIL", Cause.ENGINE, "a node of it failed (NODE_FAIL)"),
        ("TIMEOUT", Cause.ENGINE, "Slurm's time limit was over (TIMEOUT)"),
        ("CANCELLED", Cause.OTHERS, "cancelled in Slurm, outside of the fleet (scancel)"),
        ("OUT_OF_MEMORY", Cause.ITSELF, "ran out of the memory that it was granted"),
    ],
)
def test_ends_are_told_apart(tmp_path, state: str, cause: Cause, why: str) -> None:
    engine, commands = make()
    handle = engine.start(order(tmp_path, place("gpu10", 1)))
    commands.jobs = f"JobId=41 JobName=partita-f-3-2 JobState={state} ExitCode=0:9\n"
    look = engine.look({Attempt(3, 2): handle})
    status = look.statuses[Attempt(3, 2)]
    assert (status.running, status.cause) == (False, cause)
    assert status.why.startswith(why)
    assert look.away == {"gpu2": "DOWN"}


def test_what_slurm_queues_again_is_ended_there(tmp_path) -> None:
    engine, commands = make()
    handle = engine.start(order(tmp_path, place("gpu10", 1)))
    commands.jobs = "JobId=41 JobName=partita-f-3-2 JobState=PENDING Restarts=1 Reason=BeginTime\n"
    status = engine.look({Attempt(3, 2): handle}).statuses[Attempt(3, 2)]
    assert (status.running, status.why) == (False, "Slurm queued it again")
    assert commands.asked[-1] == ("scancel", "41")


def test_a_job_that_slurm_forgot_ended_as_its_script_wrote(tmp_path) -> None:
    engine, _ = make()
    handle = {**engine.start(order(tmp_path, place("gpu10", 1))), "at_s": 0.0}
    gone = engine.look({Attempt(3, 2): handle}).statuses[Attempt(3, 2)]
    assert (gone.cause, gone.why) == (Cause.ENGINE, "Slurm does not know it any more")
    note = tmp_path / "job-3/attempt-2/ended.json"
    note.parent.mkdir(parents=True)
    note.write_text('{"exit_code": 0, "at_s": 7.5}')
    done = engine.look({Attempt(3, 2): handle}).statuses[Attempt(3, 2)]
    assert (done.exit_code, done.ended_s) == (0, 7.5)


def test_a_submission_whose_answer_was_lost_is_looked_for_by_name(tmp_path) -> None:
    engine, commands = make()
    commands.fails = SlurmError("sbatch: Socket timed out", is_away=True)
    handle = engine.start(order(tmp_path, place("gpu10", 1)))
    assert handle["id"] is None
    with pytest.raises(EngineAwayError, match="Socket timed out"):
        engine.start(order(tmp_path, place("gpu10", 1)))
    commands.fails = None
    engine._controller.answered()
    commands.jobs = "JobId=41 JobName=partita-f-3-2 JobState=PENDING Restarts=0 Reason=Resources\n"
    status = engine.look({Attempt(3, 2): handle}).statuses[Attempt(3, 2)]
    assert (status.running, status.waits) == (True, "Resources")
    engine.stop(handle, grace_s=10)
    assert commands.asked[-1] == ("scancel", "41")
