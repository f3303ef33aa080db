"""How each kind of drafter makes trees, where it can and the bundle was built for them."""

from __future__ import annotations

from .contract import branch_graph, eagle_branch_graph, rank_graph
from .draft_model import DraftModel
from .drafter import Drafter
from .drafters import OpenGraph
from .eagle_brancher import EagleBrancher
from .eagle_drafter import EagleDrafter
from .manifest import DraftCard, EagleDraft, ModelDraft
from .medusa_brancher import MedusaBrancher
from .medusa_drafter import MedusaDrafter
from .model_brancher import ModelBrancher
from .ngram_brancher import NgramBrancher
from .ngram_drafter import NgramDrafter
from .tree_shape import Brancher


def load_brancher(card: DraftCard, drafter: Drafter, open_graph: OpenGraph) -> Brancher | None:
    """None for a drafter that only makes chains. Raises EngineError."""
    match drafter:
        case NgramDrafter():
            return NgramBrancher(drafter.index)
        case DraftModel() if isinstance(card, ModelDraft):
            return ModelBrancher(open_graph("branch", branch_graph(card.card.cache)), drafter)
        case EagleDrafter() if isinstance(card, EagleDraft):
            graph = open_graph("branch", eagle_branch_graph(card.card.cache))
            return EagleBrancher(graph, drafter)
        case MedusaDrafter():
            return MedusaBrancher(drafter, open_graph("rank", rank_graph()))
        case _:
            return None
