"""Which tests of ``interpreter/`` run in the sweep alone."""

# Each takes seconds, and has neighbours that run always: the same stages in another mask, or the mask on other stages.
SWEPT = {
    "test_cuda_strip.py": {
        "test_training[20 heads mix]",
        "test_training[a convolution after, earlier keys, by output]",
        "test_training[all stages, full]",
        "test_training[groups of 4, full]",
        "test_training[pairs of 10 heads in a window on both sides]",
        "test_dropout[mixing in a window]",
        "test_packed_documents[strips]",
        "test_dropout_of_packed_documents[{'post_kernel': (2, 2), 'window': (21, -1)}-sm_90a]",
    },
    "test_hidden.py": {
        "test_training[convolution of more queries than keys, sliding]",
        "test_training[convolution, sliding]",
        "test_training[output, sliding]",
    },
    "test_learned.py": {
        "test_all_passes[a sink-a mixture-cuda]",
        "test_all_passes[a sink-all stages-triton]",
        "test_all_passes[read-a mixture-triton]",
        "test_all_passes[read-all stages-cuda]",
        "test_all_passes[read-all stages-triton]",
    },
    "test_places_of_expressions.py": {
        "test_training[a bias before the convolution, by output-cuda]",
        "test_training[everywhere, full-triton]",
        "test_training[no score before the mixture-cuda]",
        "test_training[no score before the mixture-triton]",
        "test_training[one more before the convolution, full-cuda]",
        "test_training[one more before the convolution, in a window-triton]",
        "test_training[parameters before the convolution, by output-cuda]",
    },
    "test_strip.py": {
        "test_dropout_in_strips_of_some_rows[{'post_kernel': (2, 5)}]",
        "test_strips_of_some_sequences[mixing before, mixing after]",
        "test_windows[both before, both after, causal, by output]",
        "test_windows[both before, both after, later keys only, by output]",
        "test_windows_of_strips[output-40]",
    },
    "test_visible.py": {
        "test_batch[a convolution-chunks]",
        "test_batch[a convolution-falling]",
        "test_batch[a convolution-later half]",
        "test_batch_of_other_stages[a mixture-falling]",
        "test_batch_of_other_stages[after the softmax-falling]",
        "test_batch_of_other_stages[all stages-chunks seen whole]",
        "test_batch_of_other_stages_with_gaps[all stages-a list in a window]",
        "test_batch_with_gaps[a convolution-a list in a window]",
        "test_batch_with_gaps[a convolution-documents by numbers]",
        "test_batch_with_gaps[plain-a list in a window]",
        "test_packed_documents[all stages-a list in a window]",
        "test_packed_documents[all stages-prefix]",
        "test_packed_documents[plain-falling]",
    },
}
