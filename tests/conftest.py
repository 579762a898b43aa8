"""Tests in ``interpreter/`` need TRITON_INTERPRET=1 before triton is imported; ``test_interpreter.py`` runs them so."""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreter"]
