"""The connectors between lmc and inference engines. Only these modules import transformers or vLLM."""
