"""Processors for `SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE`; SGLang imports every module of this package."""
