"""The public names, and that they do not change by accident."""

import click

import partita
from partita.cli.main import partita as cli

NAMES = [
    "Cluster",
    "Example",
    "Graph",
    "Objective",
    "Plan",
    "Problem",
    "Program",
    "Solution",
    "Stage",
    "Timeline",
    "advise",
    "calibrate",
    "cancel_jobs",
    "check",
    "choose_clocks",
    "compare",
    "compare_energy",
    "convert",
    "convert_checkpoint",
    "demo",
    "doctor",
    "drain_fleet",
    "estimate",
    "evaluate",
    "explain",
    "export",
    "fleet_curve",
    "fleet_doctor",
    "fleet_trace",
    "frontier",
    "job_log",
    "job_status",
    "list_checkpoints",
    "list_devices",
    "list_jobs",
    "list_models",
    "load",
    "lower",
    "merge_profiles",
    "parallelize",
    "plan",
    "problem",
    "profile",
    "profile_energy",
    "profile_model",
    "profile_script",
    "profile_scripts",
    "recommend",
    "replan",
    "replay_clocks",
    "results",
    "robustness",
    "run",
    "run_plan",
    "save",
    "selftest",
    "serve_energy",
    "serve_fleet",
    "serve_page",
    "simulate",
    "simulate_fleet",
    "solve",
    "split",
    "submit_jobs",
    "train",
    "write_report",
]


def test_public_names_are_these() -> None:
    assert partita.__all__ == ["__version__", *NAMES]


def test_every_public_name_can_be_imported_and_is_documented() -> None:
    for name in NAMES:
        assert getattr(partita, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(partita, "no_such_name")


def test_importing_sub_packages_does_not_shadow_public_names() -> None:
    import partita.planners.table  # noqa: PLC0415
    import partita.program.check  # noqa: PLC0415

    for name in NAMES:
        assert not isinstance(getattr(partita, name), type(partita)), name


def test_every_command_and_every_command_of_a_group_can_be_loaded() -> None:
    def loaded(group: click.Group, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
        found = []
        context = click.Context(group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert isinstance(command, click.Command), (*words, name)
            found.append((*words, name))
            if isinstance(command, click.Group):
                found += loaded(command, (*words, name))
        return found

    assert {("plan",), ("energy", "serve"), ("fleet", "simulate")} <= set(loaded(cli))
