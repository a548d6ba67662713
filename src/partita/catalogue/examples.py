"""Problems that come with the package, so that an installation has something to plan.

``EXAMPLES`` is the table; the graphs are documents in ``graphs/``. The published toys are whole
problems and hold what their own files say, in the encoding of the readers in ``formats``:

* ``chain201``: DynamicMLTrainer's two chains that join at op 100, 201 ops of weight 2, on three
  equal GPUs; every edge between two GPUs costs 1. The best sharding cost is 2.
* ``six-node-chain``: SparsePipedream's input and five ops, on a TitanV and three TitanXP.
  Parameters are inflated (165 MB against 5 ms of compute), so that data parallelism is slow.
* ``baechi-fig*``: Baechi's dummy graphs, on devices of 4 units of memory. Half of the memory of an
  op is parameters with their gradients; transfers overlap with everything.

The two models are graphs of float32 tensors with the published shapes: ``gpt-small`` is GPT-2 small
with 1024 tokens at batch size 8, whose head uses the weight of the word embedding; ``resnet50``
takes 224 x 224 images at batch size 64. Their times are estimates, a roofline at fixed shares of
the peak rates that the catalogue has for the device, with the bytes of an op's inputs, outputs and
parameters as touched:

    forward_s = flops / (0.5 * peak) + touched bytes / (0.8 * memory bandwidth) + 5 us

Backward takes twice the forward time where there are trained parameters (gradients of inputs and of
weights), as long as forward elsewhere.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import resources

from partita.catalogue.catalogue import load_catalogue
from partita.catalogue.shorthand import read_shorthand
from partita.core.codec import decode_as, parse_json
from partita.core.graph import Graph
from partita.core.problem import Objective, Problem
from partita.errors import InvalidInputError


def _document(name: str) -> object:
    folder = resources.files("partita.catalogue") / "graphs"
    return parse_json((folder / f"{name}.json").read_text(encoding="utf-8"))


def _toy(name: str) -> Problem:
    return decode_as(_document(name), Problem)


def _model(name: str, cluster: str, microbatches: int) -> Problem:
    return Problem(
        graph=decode_as(_document(name), Graph),
        cluster=read_shorthand(cluster, load_catalogue()),
        objective=Objective(microbatches=microbatches),
    )


EXAMPLES: Mapping[str, Callable[[], Problem]] = {
    "chain201": partial(_toy, "chain201"),
    "six-node-chain": partial(_toy, "six-node-chain"),
    "baechi-fig1": partial(_toy, "baechi-fig1"),
    "baechi-fig2": partial(_toy, "baechi-fig2"),
    "baechi-fig21": partial(_toy, "baechi-fig21"),
    "baechi-fig3": partial(_toy, "baechi-fig3"),
    "gpt-small": partial(_model, "gpt-small", "4xa100", 8),
    "resnet50": partial(_model, "resnet50", "2xa100+2xv100", 4),
}
"""The built-in problems by name; each call makes its problem anew."""


def example(name: str) -> Problem:
    """Return a built-in problem: a graph, a default cluster for it, and an objective.

    Raises:
        InvalidInputError: There is none of that name; says which there are.
    """
    if name not in EXAMPLES:
        raise InvalidInputError(f"there is no example {name!r}; there are {', '.join(EXAMPLES)}")
    return EXAMPLES[name]()
