"""The decoder for transformers: options of single layers, and how long documents are said to be."""

from __future__ import annotations

from ..mutant import Mutant

MODELING, PADDING = "mtagen/transformers/modeling.py", "mtagen/transformers/padding.py"
CONFIGURATION = "mtagen/transformers/configuration.py"
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
        "not self.sees_later_keys",
        "True",
        "A call returns a cache whose keys and values later tokens would change.",
        (f"{OPTIONS}::test_a_layer_that_sees_later_keys_is_enough",),
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
        '"max_seqlen": self.max_seqlen}',
        "}",
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
