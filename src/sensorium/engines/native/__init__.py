"""The embedded engine: samples with the learner's own parameters, one prefill per group, continuous batching."""
