"""One rank of a job directory: a fresh process that torchrun, or our launcher, has started."""

import os
import secrets
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not in its stubs

from partita.atomic_files import replacing
from partita.capture.origin import Captures, load_origin_partly
from partita.capture.partial import without_saved_tensors
from partita.capture.without_values import load_what_torch_loads_late
from partita.core.graph import DeviceKind
from partita.core.solution import Solution
from partita.errors import InvalidInputError
from partita.processes import interface_towards, redirect_output
from partita.ranks.device import seam_of
from partita.ranks.environment import RankEnvironment
from partita.ranks.failures import as_partita_error
from partita.ranks.member import Member
from partita.ranks.setup import give_back_memory, local_device, warm_up_autograd
from partita.ranks.status import Phase, StatusBoard
from partita.runtime.emulation.rehearsal import emulated_workload, run_emulated_rank
from partita.runtime.executor import make_task, passing_over
from partita.runtime.job import Job, JobDirectory, Placement, place_ranks
from partita.runtime.numerics import ready_numerics
from partita.runtime.ownership import held_names
from partita.runtime.process_transport import used_devices
from partita.runtime.rank import RankReport, Watchdog, run_rank
from partita.runtime.rank_capture import ProcessMemory
from partita.runtime.tensor_parallel import is_divided, slices_of
from partita.runtime.training.parallelize import ScriptRank, run_script
from partita.runtime.training.saving import AUTO
from partita.runtime.weights import LoadedWeights, load_weights
from partita.runtime.workload import model_workload, use_repeatable_algorithms

_CHUNK_BYTES = 2**20


def be_rank(directory: Path, environment: RankEnvironment) -> int:
    """Be a rank of a job; returns the exit code of the process.

    What it prints goes to its log; why it failed, in one line, to stderr as well.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever started it passes the signal on
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # asks the launcher, sent to all of a job
    files = JobDirectory(directory, environment.attempt)
    job, solution = files.read_job(), files.read_solution()
    placement = place_ranks(solution.problem, job.program(solution), environment.num_hosts)
    rank = find_rank(placement, environment)
    files.prepare()
    console = os.dup(2)
    redirect_output(files.log(rank))
    try:
        _take_part(files, job, solution, rank, placement=placement, environment=environment)
    except BaseException as exc:  # noqa: BLE001 (a process border: the launcher reads the error)
        error = as_partita_error(rank, exc)
        files.write_error(rank, error)
        traceback.print_exc()
        os.write(console, f"partita: {error}\n".encode())
        return error.exit_code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def find_rank(placement: Placement, environment: RankEnvironment) -> int:
    """Return which rank of the plan a process is.

    Raises:
        InvalidInputError: Another number of processes was started than the plan needs here.
    """
    ranks = placement.hosts[environment.host]
    if environment.num_local_ranks != len(ranks):
        raise InvalidInputError(
            f"the plan has {len(ranks)} ranks on host {environment.host}, "
            f"{environment.num_local_ranks} were started; use --nproc-per-node {len(ranks)}"
        )
    return ranks[environment.local_rank]


def use_interface_towards(environment: RankEnvironment) -> None:
    """Let gloo use the network that leads to the others, unless the user has named one."""
    interface = "lo" if environment.num_hosts == 1 and sys.platform.startswith("linux") else ""
    found = interface or interface_towards(environment.address, environment.port)
    if found:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found)


def _take_part(
    files: JobDirectory,
    job: Job,
    solution: Solution,
    rank: int,
    *,
    placement: Placement,
    environment: RankEnvironment,
) -> None:
    """Build the model, meet the others, run, and leave what was seen."""
    use_interface_towards(environment)
    board = files.open_board(environment.host, placement.num_ranks)
    with Watchdog(rank, board, job.stall_limit_s) as watchdog:
        gpu = job.device is DeviceKind.GPU
        device = local_device(
            placement.local_index[rank], gpu=gpu, num_local_ranks=environment.num_local_ranks
        )
        warm_up_autograd()
        play = _prepare(job, solution, rank, device, is_again=environment.attempt > 0)
        watchdog.enter(Phase.MEET)
        store = environment.open_store(job.start_limit_s)
        member = Member(
            rank=rank,
            world=placement.num_ranks,
            store=PrefixStore(f"attempt{environment.attempt}", store),
            device=device,
            backend=seam_of(device).backend,
            limit_s=max(job.start_limit_s, job.stall_limit_s),
            notify=files.news_writer(rank),
        )
        member.join()
    report = play(member, board)
    with Watchdog(rank, board, job.stall_limit_s) as watchdog:
        watchdog.enter(Phase.REPORT)
        files.write_report(rank, report)
        hand_over(files, member)


def _prepare(
    job: Job, solution: Solution, rank: int, device: torch.device, *, is_again: bool
) -> Callable[[Member, StatusBoard], RankReport]:
    """Return what the rank does once it has met the others."""
    load_what_torch_loads_late()
    give_back_memory()
    memory = ProcessMemory()
    problem, plan = solution.problem, solution.plan
    emulation = job.emulation()
    if emulation is not None:
        emulated = emulated_workload(problem, plan, emulation)
        return lambda member, board: run_emulated_rank(
            emulated, member, board=board, on_step=member.notify
        )
    if job.script:
        if is_again and job.checkpoints:
            job = replace(job, resume=AUTO)
        return lambda member, board: run_script(
            job.script, ScriptRank(member=member, board=board, solution=solution, job=job)
        )
    assert job.model is not None
    if job.same_data:
        use_repeatable_algorithms()
    origin = replace(job.model, options=replace(job.model.options, device=str(device)))
    numerics = ready_numerics(job.recipe.precision, device.type)
    # A rank has memory for what its stages hold: the model has stand-ins for all else.
    here = used_devices(job.program(solution))[rank]
    held = held_names(problem.graph, plan, here)
    source = load_origin_partly(origin, held)
    taken = LoadedWeights()
    # How a group divides parameters follows from the captured ops, so slices are read afterwards.
    divided = is_divided(plan, here)
    if job.weights and not divided:
        taken = load_weights(source.model, Path(job.weights), held)
    known = problem.graph if job.compared else None
    captures = Captures(source, origin, lambda: numerics.autocast(device.type), known=known)
    with without_saved_tensors():
        workload = model_workload(
            captures, problem, plan, same_data=job.same_data, data=job.data, hands_over=True
        )
    for passed in job.passed:
        workload = passing_over(workload, passed)
    give_back_memory()
    task = make_task(problem, plan, workload, order=job.order)
    if job.weights and divided:
        taken = load_weights(source.model, Path(job.weights), held, slices_of(task, here))
    options = job.rank_options().again() if is_again else job.rank_options()

    def play(member: Member, board: StatusBoard) -> RankReport:
        report = run_rank(
            task, member, workload, options=options, board=board, on_step=member.notify
        )
        report = replace(report, weight_bytes=taken.bytes_read)
        if report.memory is not None and report.memory.exact:
            return report
        return replace(report, memory=memory.use())  # the growth since before the model was built

    return play


def hand_over(files: JobDirectory, member: Member) -> None:
    """Bring the reports of all ranks to rank 0's directory, through the store.

    Where ranks share that directory nothing is sent.
    """
    store = PrefixStore("reports", member.store)
    if member.rank:
        _send_report(files, member.rank, store)
        return
    mark = files.ranks / f"mark-{secrets.token_hex(8)}"
    mark.touch()
    store.set("mark", mark.name)
    for rank in range(1, member.world):
        _fetch_report(files, rank, store)
    mark.unlink()


def _send_report(files: JobDirectory, rank: int, store: Store) -> None:
    is_shared = (files.ranks / store.get("mark").decode()).exists()
    chunks = 0
    if not is_shared:
        with files.report(rank).open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                store.set(f"{rank}/{chunks}", chunk)  # type: ignore[arg-type]  # bytes do
                chunks += 1
    store.set(f"{rank}/chunks", str(chunks))


def _fetch_report(files: JobDirectory, rank: int, store: Store) -> None:
    chunks = int(store.get(f"{rank}/chunks"))
    if not chunks:
        return
    with replacing(files.report(rank)) as part, part.open("wb") as file:
        for chunk in range(chunks):
            file.write(store.get(f"{rank}/{chunk}"))
            store.delete_key(f"{rank}/{chunk}")
