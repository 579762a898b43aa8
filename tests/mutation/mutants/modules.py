"""What a layer must survive: casts, pickling, and tools that replace its parts."""

from __future__ import annotations

from ..mutant import Mutant

LAYER, REPLACED, PICKLED = "mtagen/nn/layer.py", "tests/test_replaced_modules.py", "tests/test_pickle.py"
STAGES, ADAPTED = "mtagen/nn/stages.py", "tests/test_peft.py"

MUTANTS = (
    Mutant(
        "layer-output-projection-not-called",
        LAYER,
        "self.wo(out.reshape(*x.shape[:-1], self.n_local_heads * self.head_dim))",
        "nn.functional.linear(out.reshape(*x.shape[:-1], self.n_local_heads * self.head_dim), *self.wo.parameters())",
        "What a tool has put in the place of the output projection is passed by.",
        (REPLACED,),
    ),
    Mutant(
        "layer-mixing-not-called",
        STAGES,
        "holder.wpsm()",
        "holder.wpsm.weight",
        "Weights that a tool brings when their module is called are not there.",
        (REPLACED,),
    ),
    Mutant(
        "layer-leaves-autocast-to-projections",
        LAYER,
        "q, k, v = autocast(q, k, v)",
        "pass",
        "Projections of QLoRA, which return fp32 under autocast, do not fit the kernels.",
        (REPLACED,),
    ),
    Mutant(
        "stages-copied-with-the-layers-weights",
        STAGES,
        "copy.deepcopy(getattr(self.holder, name), memo)",
        "getattr(self.holder, name)",
        "An adapter trains the weights of the model that it should leave alone.",
        (ADAPTED,),
    ),
    Mutant(
        "stages-put-back-without-their-weights",
        LAYER,
        "value.give(self)",
        "pass",
        "A merge of an adapter forgets the stages that were trained.",
        (ADAPTED,),
    ),
    Mutant(
        "model-cache-like-the-parameters",
        "mtagen/transformers/cache.py",
        "like=x",
        "like=None",
        "A model whose weights are offloaded cannot generate.",
        ("tests/test_offload.py",),
    ),
    Mutant(
        "cache-of-any-parameters-dtype",
        LAYER,
        "if x.is_floating_point()",
        "if True",
        "A projection of integers makes a cache of integers.",
        (REPLACED,),
    ),
    Mutant(
        "cache-asks-no-module-but-the-projection",
        LAYER,
        "itertools.chain(self.wk.parameters(), self.parameters())",
        "itertools.chain(self.parameters(), self.wk.parameters())",
        "The cache has the dtype of weights that may stay in fp32, not that of keys.",
        (REPLACED,),
    ),
    Mutant(
        "layer-of-16-bits-for-ever",
        LAYER,
        'if op.plan.backend != "torch":',
        "if op:",
        "A layer that was made in 16 bits refuses other dtypes where nothing was compiled.",
        ("tests/test_nn.py::test_cast",),
    ),
    Mutant(
        "layer-unpickled-for-the-default-dtype",
        LAYER,
        "self.op = build_for(self._projected().dtype, self._build_options)",
        "self.op = build(**self._build_options)",
        "A layer in fp16 that comes from a machine without a GPU gets kernels for bf16.",
        (PICKLED,),
    ),
    Mutant(
        "op-pickled-by-its-key",
        "mtagen/ops/attention.py",
        "return self._build_again, ()",
        "return partial(AttentionOp, self.plan, self._key, self.dtypes, self._drops), ()",
        "An op that another process unpickles was never built there.",
        (PICKLED,),
    ),
    Mutant(
        "op-tuned-when-it-is-unpickled",
        "mtagen/op.py",
        'arguments | options_of(spec) | {"tune": False}',
        "arguments | options_of(spec)",
        "Loading a checkpoint takes minutes of tuning.",
        (PICKLED,),
    ),
    Mutant(
        "model-gate-as-the-layer-starts-it",
        "mtagen/transformers/modeling.py",
        "nn.init.normal_(module.weight, std=self.config.initializer_range)",
        "pass",
        "A model's gate does not start with the deviation that its configuration names.",
        ("tests/test_transformers.py::test_initial_values",),
    ),
    Mutant(
        "adapters-of-all-modules-of-a-name",
        "mtagen/transformers/adapters.py",
        'f"{parent}.{child}".lstrip(".")',
        "child",
        "A router of experts that is called gate is trained and saved whole.",
        (f"{ADAPTED}::test_names_in_other_modules",),
    ),
    Mutant(
        "adapters-without-stages-of-retrofits",
        "mtagen/transformers/adapters.py",
        "(Stages, ScoreStages)",
        "Stages",
        "Retrofitted models are refused.",
        (f"{ADAPTED}::test_names_in_each_family",),
    ),
)
