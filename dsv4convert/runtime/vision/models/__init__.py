"""Model classes for `SGLANG_EXTERNAL_MODEL_PACKAGE`; SGLang imports every module of this package."""
