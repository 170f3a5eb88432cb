"""How good a model is: perplexity, benchmarks, comparisons of runs."""
