"""Pictures in the server: what SGLang's own ways for models and processors of others are pointed at.

`models` and `processors` are the two packages that it scans; `blocks` says where the pictures of a request
stand. The rest are patches: `dsv4convert.runtime.patches.window`, `chat` and `whole`.
"""
