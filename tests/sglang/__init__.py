"""The contract with the published SGLang 0.5.16; `make test-sglang` runs it in an environment of its own."""
