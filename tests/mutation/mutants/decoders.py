"""The decoder for transformers: options of single layers, a retrofit, and how long documents are said to be."""

from __future__ import annotations

from ..mutant import Mutant

MODELING, PADDING = "mtagen/transformers/modeling.py", "mtagen/transformers/padding.py"
RETROFIT, CONFIGURATION = "mtagen/transformers/retrofit.py", "mtagen/transformers/configuration.py"
OPTIONS = "tests/test_decoder_options.py"

MUTANTS = (
    Mutant(
        "decoder-asks-the-first-layer-what-it-sees",
        MODELING,
        "any(layer.self_attn.op.plan.spec.right != 0 for layer in layers)",
        "layers[0].self_attn.op.plan.spec.right != 0",
        "A language model is made whose later layers see the token that it is to predict.",
        (f"{OPTIONS}::test_a_layer_that_sees_later_keys_is_enough",),
    ),
    Mutant(
        "decoder-all-layers-must-see-later-keys",
        MODELING,
        "self.sees_later_keys = any(",
        "self.sees_later_keys = all(",
        "The same, unless all layers do.",
        (f"{OPTIONS}::test_a_layer_that_sees_later_keys_is_enough",),
    ),
    Mutant(
        "decoder-caches-what-later-keys-change",
        MODELING,
        "and not self.sees_later_keys",
        "",
        "A call returns a cache whose keys and values later tokens would change.",
        (f"{OPTIONS}::test_a_layer_that_sees_later_keys_is_enough",),
    ),
    Mutant(
        "retrofit-shares-how-to-generate",
        RETROFIT,
        "copy.deepcopy(model.generation_config)",
        "model.generation_config",
        "What is set for the copy is set for the model, too.",
        (f"{OPTIONS}::test_a_retrofit_shares_nothing_with_the_model",),
    ),
    Mutant(
        "retrofit-with-another-epsilon",
        RETROFIT,
        "rms_norm_eps=theirs.rms_norm_eps,",
        "",
        "Norms divide by other roots than the model's.",
        (f"{OPTIONS}::test_a_retrofit_keeps_the_configuration",),
    ),
    Mutant(
        "retrofit-without-an-end",
        RETROFIT,
        "eos_token_id=theirs.eos_token_id,",
        "",
        "A configuration that is saved no longer says where texts end.",
        (f"{OPTIONS}::test_a_retrofit_keeps_the_configuration",),
    ),
    Mutant(
        "retrofit-that-always-caches",
        RETROFIT,
        "use_cache=theirs.use_cache,",
        "",
        "Calls return caches though the model's do not.",
        (f"{OPTIONS}::test_a_retrofit_keeps_the_configuration",),
    ),
    Mutant(
        "retrofit-with-windows",
        RETROFIT,
        '"frequency_scaling", "window")',
        '"frequency_scaling")',
        "A layer of a retrofit sees fewer keys than the model's.",
        (f"{OPTIONS}::test_no_layer_of_a_retrofit_computes_something_else",),
    ),
    Mutant(
        "padding-longest-stated-document-ignored",
        PADDING,
        "total if max_length_q is None else int(max_length_q)",
        "total",
        "Memory grows with all tokens instead of with the longest document.",
        (f"{OPTIONS}::test_stated_documents",),
    ),
    Mutant(
        "padding-longest-found-document-ignored",
        PADDING,
        "int(cu_seqlens.diff().max())",
        "total",
        "The same, of documents that masks and positions tell.",
        (f"{OPTIONS}::test_documents_that_are_found",),
    ),
    Mutant(
        "padding-layers-told-no-longest-document",
        PADDING,
        "positions=at, cu_seqlens=cu_seqlens, max_seqlen=self.max_seqlen",
        "positions=at, cu_seqlens=cu_seqlens",
        "The same, in any case.",
        (f"{OPTIONS}::test_stated_documents",),
    ),
    Mutant(
        "options-of-no-single-layer",
        CONFIGURATION,
        "self.layer_overrides.get(str(layer), {})",
        "self.layer_overrides.get(layer, {})",
        "All layers have the options of the model.",
        (f"{OPTIONS}::test_an_option_of_one_layer_is_that_of_no_other",),
    ),
    Mutant(
        "options-of-the-model-win",
        CONFIGURATION,
        "options = {name: getattr(self, name) for name in LAYER_OPTIONS} | self.layer_overrides.get(str(layer), {})",
        "options = self.layer_overrides.get(str(layer), {}) | {name: getattr(self, name) for name in LAYER_OPTIONS}",
        "The same.",
        (f"{OPTIONS}::test_an_option_of_one_layer_is_that_of_no_other",),
    ),
    Mutant(
        "options-rescaled-by-the-first-layer",
        CONFIGURATION,
        'layer if options["depth_rescale"] else None',
        '0 if options["depth_rescale"] else None',
        "Norms of later layers rescale by the first layer's factor.",
        (f"{OPTIONS}::test_an_option_of_one_layer_is_that_of_no_other",),
    ),
    Mutant(
        "options-rescaled-as-the-model-says",
        CONFIGURATION,
        'layer if options["depth_rescale"] else None',
        "layer if self.depth_rescale else None",
        "No single layer can rescale.",
        (f"{OPTIONS}::test_an_option_of_one_layer_is_that_of_no_other",),
    ),
    Mutant(
        "options-frequencies-of-the-model",
        CONFIGURATION,
        '_frequency_scaling(options["frequency_scaling"])',
        "_frequency_scaling(self.frequency_scaling)",
        "No single layer can scale its frequencies.",
        (f"{OPTIONS}::test_an_option_of_one_layer_is_that_of_no_other",),
    ),
)
