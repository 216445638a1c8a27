"""Where lmc meets an inference engine. The only modules that import transformers or vLLM."""
