"""What a mutant is, and names of the files that many mutants share."""

from __future__ import annotations

from typing import NamedTuple

from .anchors import replace


class Mutant(NamedTuple):
    """One bug.

    Attributes:
        name: what it is called on the command line.
        file: where it is, below the repository's root.
        old: code that occurs exactly once in the file, whatever its comments and layout; see :mod:`.anchors`.
        new: what stands there instead.
        harm: what goes wrong, in a sentence.
        killed_by: tests of which one must fail, as pytest takes them: files or tests below the repository's root.
        within: the function, class or macro in which ``old`` is searched, such as ``Plan.replaced``; default the file.
    """

    name: str
    file: str
    old: str
    new: str
    harm: str
    killed_by: tuple[str, ...]
    within: str = ""

    def applied(self, text: str) -> str:
        """What is in the file, with the bug.

        Raises:
            AnchorError: ``old`` is not in the code, or is there more than once.
        """
        return replace(text, self.file, self.old, self.new, self.within)


CUDA, TRITON, HOST = (f"mtagen/templates/{folder}" for folder in ("cuda", "triton", "host"))
EMULATED, INTERPRETED = "tests/test_emulated_kernels.py", "tests/interpreter/test_kernels.py"
INTERPRETED_DECODE = "tests/interpreter/test_decode.py"
INTERPRETED_STRIP = "tests/interpreter/test_strip.py"
INTERPRETED_DOCUMENTS = "tests/interpreter/test_documents.py"
INTERPRETED_DROPOUT = "tests/interpreter/test_dropout.py"
INTERPRETED_LOGITS = "tests/interpreter/test_logits.py"
INTERPRETED_PLACES = "tests/interpreter/test_places_of_expressions.py"
CUDA_IN_STRIPS = "tests/interpreter/test_cuda_strip.py"
ON_CHIP_GRADIENTS = "tests/interpreter/test_on_chip_gradients.py"
EMULATED_STRIP = "tests/test_emulated_strip.py"
EMULATED_CONTRACTIONS = "tests/test_emulated_contractions.py"
EMULATED_HEADS = "tests/test_emulated_heads.py"
EMULATED_DOCUMENTS = "tests/test_emulated_documents.py"
SM90, SM80 = "sm_90a-6x11-d64-bf16-both-causal-source", "sm_80-6x11-d64-fp16-both-causal-source"
PIPELINE = "mtagen/cpu/pipeline.py"
