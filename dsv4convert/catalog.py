"""The finding codes: what each one means, how grave it is, and what to do about it.

Codes are interface: they appear in ``--json`` and in scripts of others. The errors page of the
documentation is generated from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of the catalogue: what a finding code means and what to do about it.

    Attributes:
        severity: ``error`` fails the command; ``warning`` does so only under ``--strict``.
        meaning: One sentence for the errors page.
        hint: The default next action; a finding may carry a more precise one.
    """

    severity: Severity
    meaning: str
    hint: str


# fmt: off
_REDOWNLOAD = "download this file again with the pinned `--revision`"
_COMPLETE = "complete the download; `hf download` resumes what is missing"

CATALOG: Mapping[str, Kind] = {
    # The directory and its side files.
    "dir.not-found": Kind("error", "The path does not exist or is not a directory.", "pass the directory that holds `config.json` and the shards"),
    "dir.no-weights": Kind("error", "The directory holds no safetensors shard.", "only safetensors checkpoints are read; pickle files are never opened"),
    "dir.single-file": Kind("error", "The weights are one unindexed `model.safetensors`.", "official releases are sharded; download the official repository"),
    "file.unreadable": Kind("error", "A file exists but cannot be opened.", "check its permissions and owner"),
    "file.not-regular": Kind("error", "A shard, an index, `config.json` or a file to copy is not a regular file.", "replace it by the real file"),
    "file.dangling-link": Kind("error", "A symbolic link points to a file that is gone.", "copy with `cp -L` or `rsync -L`, or run `hf download` again to restore the blob"),
    "file.outside-link": Kind("error", "A symbolic link leaves the model directory and is no Hugging Face cache blob.", "replace the link by the file"),
    "file.lfs-pointer": Kind("error", "A Git LFS pointer lies where the content should be.", "run `git lfs pull`, or download with `hf download`"),
    "file.html-page": Kind("error", "A web page was saved under the name of a model file.", "the download was refused or redirected; log in or use another mirror, then download again"),
    "file.incomplete": Kind("warning", "Pieces of an unfinished download are left in the directory.", _COMPLETE),
    "file.pickle": Kind("warning", "A pickle file lies beside the shards. It is never opened and never copied.", "remove it if nothing else needs it"),
    "file.stray": Kind("warning", "A weight file is not part of the checkpoint. It is never copied.", "remove it, or check whether the index is stale"),
    "side.missing": Kind("warning", "A non-weight file of the official repository is absent.", "download the repository without `--include` filters"),
    "side.other-quantization": Kind("error", "A second quantization config contradicts `config.json`.", "remove `hf_quant_config.json`, which belongs to another export"),
    # config.json
    "config.missing": Kind("error", "There is no `config.json`.", _COMPLETE),
    "config.not-json": Kind("error", "`config.json` is not a JSON object.", _REDOWNLOAD),
    "config.field": Kind("error", "A field of `config.json` that the layout depends on is absent or has an impossible value.", "restore the official `config.json` of this release"),
    "config.dspark": Kind("error", "The DSpark fields of `config.json` are incomplete or contradict each other.", "restore the official `config.json`; the runtime reads all four fields"),
    "config.unknown-model": Kind("error", "`config.json` describes no model this tool knows.", "supported: DeepSeek-V4-Flash, -0731, -DSpark, -Vision-Exp, V4.1-Flash, V4-Pro, V4-Pro-0813 and pruned derivatives"),
    "config.quantization": Kind("error", "`quantization_config` does not say what the stored tensors are.", "restore the `config.json` that belongs to these shards"),
    "config.skip-list": Kind("error", "The skip list of `quantization_config` does not match the modules of the runtime.", "take the list that `dsv4convert convert` writes"),
    "config.skip-entry": Kind("warning", "An entry of the skip list matches no module of the runtime.", "harmless by itself; often a name from another name space, whose real module is then not skipped"),
    "config.section": Kind("error", "The `dsv4convert` section of `config.json` does not describe these shards.", "restore the `config.json` that was written with them"),
    "config.vision": Kind("error", "Vision tensors and vision fields of `config.json` do not agree.", "restore the official `config.json` of the vision release"),
    # The index.
    "index.missing": Kind("error", "There is no `model.safetensors.index.json`.", "download it; it can be rebuilt from the shard headers, but this tool never does so silently"),
    "index.not-json": Kind("error", "The index is not a JSON object with a `weight_map`.", _REDOWNLOAD),
    "index.duplicate-key": Kind("error", "A JSON file repeats a key; readers keep only one of the values.", _REDOWNLOAD),
    "index.bad-shard-name": Kind("error", "`weight_map` names a shard that is not the plain file name of a `.safetensors` file.", "never use this index; download the official one"),
    "index.wrong-shard": Kind("error", "`weight_map` puts a tensor into a shard that does not hold it.", "the index belongs to another export; download the matching one"),
    "index.ghost-tensor": Kind("error", "`weight_map` names a tensor that no shard holds.", "the index belongs to another export; download the matching one"),
    "index.unindexed-tensor": Kind("error", "A shard holds a tensor that `weight_map` does not name.", "the index is older than the shards; download the matching one"),
    "index.total-size": Kind("warning", "`metadata.total_size` of the index is not the sum of the tensors.", "harmless for loading; `convert` writes the exact number"),
    # Shards.
    "shard.missing": Kind("error", "A shard that the index names is not there.", _COMPLETE),
    "shard.count": Kind("warning", "The number of shards is not that of the official release.", "normal for a re-sharded copy; the official release was not downloaded as it is"),
    "shard.numbering": Kind("error", "Shard names do not count from 1 to N.", "the directory mixes two exports, or a shard was renamed"),
    "shard.truncated": Kind("error", "A shard is shorter than its header declares.", _REDOWNLOAD),
    "shard.trailing-bytes": Kind("error", "A shard is longer than its header declares.", _REDOWNLOAD),
    "shard.header": Kind("error", "A shard does not begin with a valid safetensors header.", _REDOWNLOAD),
    "shard.duplicate-key": Kind("error", "A shard header repeats a key; readers keep only one of the values.", _REDOWNLOAD),
    "shard.dtype": Kind("error", "A shard header uses a dtype unknown to the safetensors format.", "this version reads the dtypes of safetensors 0.8"),
    "shard.offsets": Kind("error", "Tensor ranges of a shard overlap, leave a gap, or do not match shape times dtype.", _REDOWNLOAD),
    "tensor.twice": Kind("error", "One tensor name is held by more than one shard.", "the directory mixes two exports; download into an empty directory"),
    # Names, dtypes, shapes.
    "name.unknown": Kind("error", "No rule knows this tensor name for this release.", "`dsv4convert inspect --tensors` lists what the checkpoint holds"),
    "name.unexpected": Kind("error", "The tensor is known, but `config.json` describes a model without it.", "compare `config.json` with the shards: one of them belongs to another release"),
    "name.resaved": Kind("error", "The tensors carry the names of a library re-save, not the official ones.", "use the official repository; a re-saved copy is not converted"),
    "name.scale-suffix": Kind("error", "Block scales carry a suffix of another layout.", "use the official repository; its scales end in `.scale` and multiply"),
    "release.base": Kind("error", "This is a Base checkpoint: FP8 experts with F32 scales.", "Base releases store no MXFP4 experts and are not converted by this tool"),
    "unit.missing-tensor": Kind("error", "The config requires a tensor that is not there.", "download the official repository again; after pruning, `config.json` must say what is left"),
    "unit.missing-scale": Kind("error", "A quantized weight has no block scale.", "download the official repository again; after pruning, `config.json` must say what is left"),
    "unit.orphan-scale": Kind("error", "A block scale has no weight.", "download the official repository again; after pruning, `config.json` must say what is left"),
    "unit.dtype": Kind("error", "A tensor has another dtype than its role requires.", "the file was re-saved or belongs to another release"),
    "unit.shape": Kind("error", "A tensor has another shape than `config.json` requires.", "compare `config.json` with the shard header"),
    "unit.scale-grid": Kind("error", "A scale grid is not the one its weight and block require.", "compare `weight_block_size` in `config.json` with the header"),
    "unit.scale-dtype": Kind("error", "A block scale is not stored as F8_E8M0.", "a scale byte must never be read as a number; use the official file"),
    # Values.
    "value.e4m3-nan": Kind("error", "An E4M3 weight holds NaN codes (0x7F, 0xFF).", _REDOWNLOAD),
    "value.scale-nan": Kind("error", "A UE8M0 scale byte is 255, which is NaN.", _REDOWNLOAD),
    "value.inexact": Kind("error", "A block leaves the range in which the conversion to BF16 is exact.", "pass `--allow-rounding`; the manifest lists the blocks"),
    "value.mxfp4-overflow": Kind("error", "An MXFP4 scale byte of 253 or 254 makes the largest code overflow BF16.", "pass `--allow-rounding`; the manifest lists the blocks"),
    "value.scale-statistics": Kind("warning", "Most scale bytes of a weight are far from those of official releases.", "`--checksums auto` tells whether the file is the published one; a scale byte is an exponent, never a number"),
    "value.hole": Kind("error", "Whole pages of a weight hold one repeated byte or repeat the page before.", "part of the file was reserved but never written: fetch it again; `--checksums auto` tells for certain"),
    "value.unused-rows": Kind("warning", "Whole pages of a lookup table hold one repeated byte or repeat the page before.", "rows of unused tokens, or a part that was never written: `--checksums auto` tells which"),
    "value.non-finite": Kind("error", "A BF16 or F32 tensor holds infinity or NaN.", _REDOWNLOAD),
    "value.expert-id": Kind("error", "A hash router names an expert that does not exist.", _REDOWNLOAD),
    "value.scale-range": Kind("error", "A row's channel scale would leave the normal range of F32.", "keep the experts: `--experts mxfp4`, into an empty directory"),
    "value.relative-error": Kind("error", "The INT8 repack of a tensor exceeds the error limit.", "run the same command with a larger `--max-relative-error`, or keep the experts: `--experts mxfp4`, into an empty directory"),
    "value.exact-share": Kind("error", "The INT8 repack of a tensor changes more codes than allowed.", "run the same command with a smaller `--min-exact`, or keep the experts: `--experts mxfp4`, into an empty directory"),
    # Planning and writing.
    "src.not-official": Kind("error", "The checkpoint is a converted one.", "check it with `dsv4convert converted`"),
    "src.converted": Kind("error", "The source is already a converted `int8` checkpoint.", "convert from the official checkpoint or from an `mxfp4` output"),
    "src.changed": Kind("error", "The source changed while it was being converted.", "find out who writes to the source, then run `convert` again"),
    "src.consume": Kind("error", "`--consume` would delete files that may belong to somebody else too.", "convert without `--consume`, or give the source a directory of its own with regular files only"),
    "src.consumed": Kind("error", "Parts of the source were consumed, and what was made of them is not there as recorded.", "restore the destination as it was; otherwise download the source again and convert into an empty directory"),
    "dst.not-empty": Kind("error", "The destination exists and is neither empty nor a conversion of this plan.", "choose an empty directory"),
    "dst.other-plan": Kind("error", "The destination holds shards of another plan.", "choose an empty directory, or repeat the options and the source that started this one"),
    "dst.inside-source": Kind("error", "The destination is the source, or one lies inside the other.", "choose a directory outside the source"),
    "dst.not-writable": Kind("error", "The destination cannot be written.", "check permissions and mount options"),
    "dst.no-space": Kind("error", "The destination file system is too small or full.", "free the space and run the same command again; finished shards are kept"),
    "dst.not-converted": Kind("error", "The checkpoint is an official one, not a conversion.", "check it with `dsv4convert original`"),
    "dst.unfinished": Kind("error", "The conversion is not finished.", "run the same `convert` command again; finished shards are kept"),
    "tp.split": Kind("error", "A tensor-parallel split would cut a block or group.", "choose another tensor-parallel size or layout"),
    "serve.context": Kind("error", "The context is longer than the model's `max_position_embeddings`.", "choose a shorter `--context`"),
    "serve.memory": Kind("error", "Weights and KV pools do not fit the cards.", "lower `--context` or `--concurrency`, or raise `--tp` or `--mem-fraction-static`; `docs/memory.md` has the formulas"),
    "device.unavailable": Kind("error", "The device that was asked for cannot convert.", "convert with `--device cpu`, which gives the same bytes"),
    "device.failed": Kind("error", "The GPU ran out of memory or failed during a conversion.", "run the same command with fewer `--jobs` or with `--device cpu`; finished shards are kept"),
    # A server and the machine it runs on.
    "serve.release": Kind("error", "The runtime of this project does not serve this model.", "`docs/releases.md` says which releases are served"),
    "serve.draft": Kind("error", "DSpark was asked for, and the checkpoint holds no DSpark draft.", "serve without `--dspark`, or convert a release that has the draft"),
    "serve.backend": Kind("error", "The backend for the routed experts cannot read their layout.", "use `--moe-backend ours`, or convert with `--experts mxfp4`"),
    "serve.environment": Kind("error", "An environment variable contradicts what the server needs.", "unset it and run the command again"),
    "serve.poison": Kind("warning", "The server would run with a switch that is for tests only.", "unset `DSV4_SM80_POISON`, unless you test that padding does not reach the answers"),
    "serve.tiles": Kind("error", "The file of tiles that `DSV4_SM80_TILES` names is none, or holds a number that no kernel takes.", "write it anew with `python -m kernels_ref.sm80.tune FILE` on a card like those that serve, or unset the variable"),
    "serve.exposed": Kind("error", "The server would be reachable from other machines without a key.", "make one with `dsv4convert keygen FILE` and pass `--api-key-file FILE`, or listen on 127.0.0.1"),
    "serve.pictures": Kind("error", "An option of the server cannot be combined with pictures.", "change the option that the message names; `docs/serving.md` has a section about Vision-Exp"),
    "serve.no-effect": Kind("warning", "An option or a variable changes nothing about this server.", "leave it out, or correct it"),
    "serve.died": Kind("error", "The server ended by itself.", "read the last lines of the log; they are shown above"),
    "serve.timeout": Kind("error", "The server was not ready in time.", "read the last lines of the log; a first start compiles kernels: pass a larger `--ready-timeout`"),
    "serve.guard": Kind("error", "The server came up, but not as the shim requires, and was ended.", "run `preflight`; if it finds nothing, report the log"),
    "serve.left": Kind("error", "Processes of a server could not be ended.", "look at `nvidia-smi`; a process that a driver holds goes only with the machine"),
    "sglang.missing": Kind("error", "SGLang is not installed.", "install SGLang 0.5.16 first, then this package with `--no-deps`; see `docs/serving.md`"),
    "sglang.version": Kind("error", "SGLang is another version than the shim was written against.", "install SGLang 0.5.16; see `docs/serving.md`"),
    "sglang.commit": Kind("error", "The checkout of SGLang is at another commit.", "check out the commit that the message names"),
    "sglang.library": Kind("error", "A library that SGLang needs for this model is not installed.", "install SGLang with its dependencies; see `docs/serving.md`"),
    "sglang.pin": Kind("warning", "A library is another version than the one SGLang pins or the kernels were tested with.", "install the pinned version; nothing else was tested"),
    "sglang.compiler": Kind("warning", "A program is missing that compiles kernels at the first start.", "install the CUDA toolkit, ninja and a C++ compiler, or bring filled caches along"),
    "key.missing": Kind("error", "The key file cannot be read.", "make one with `dsv4convert keygen FILE`"),
    "key.mode": Kind("error", "Other users have access to the key file.", "run `chmod 600` on it, and make a new key if others may have read it"),
    "key.owner": Kind("error", "The key file belongs to another user.", "make one of your own with `dsv4convert keygen FILE`"),
    "key.content": Kind("error", "The key file does not hold one usable key.", "make one with `dsv4convert keygen FILE`"),
    "key.exists": Kind("error", "A key was to be written over an existing file.", "use the key that is there, or name a new file"),
    "gpu.unseen": Kind("error", "torch could not say which GPUs there are.", "run `python -c 'import torch; print(torch.cuda.device_count())'` and mend what it reports"),
    "gpu.count": Kind("error", "There are fewer GPUs than the tensor-parallel size.", "lower `--tp`, or show the server more GPUs"),
    "gpu.arch": Kind("error", "A GPU has another compute capability than the kernels are for.", "use A100 or A800; `--allow-arch` accepts others for tests"),
    "gpu.memory": Kind("error", "Other processes hold memory that the server needs.", "end them: `nvidia-smi` lists them"),
    "gpu.busy": Kind("warning", "Other processes hold memory of a GPU that will be used.", "end them: `nvidia-smi` lists them; SGLang plans its pools with what is free"),
    "host.shm": Kind("error", "There is too little shared memory for several ranks.", "give the container more: `docker run --shm-size=32g`"),
    "host.port": Kind("error", "A port cannot be opened.", "end what listens there, or choose another `--port`"),
    # A converted checkpoint.
    "shard.metadata": Kind("warning", "A shard lacks `format: pt`; some loaders refuse or skip it.", "convert with this tool, which writes it"),
    "manifest.missing": Kind("warning", "There is no `dsv4convert.json`: the checkpoint is of other origin.", "names, dtypes, shapes and config are checked all the same; origin and hashes are not"),
    "manifest.not-json": Kind("error", "`dsv4convert.json` is not a manifest of a known version.", "convert again, or restore the file"),
    "manifest.mismatch": Kind("error", "The manifest does not describe these shards.", "convert again, or restore the files that belong together"),
    "reference.other": Kind("error", "The reference is not the source of this conversion.", "pass the checkpoint that was converted"),
    "reference.bytes": Kind("error", "A tensor differs from what the reference gives.", "convert this checkpoint again from the reference"),
    "content.hash": Kind("error", "Stored bytes do not have the recorded hash.", "convert again, or restore the file from where it was published"),
    # A download against hash lists.
    "content.sources": Kind("error", "Two hash lists disagree about a file.", "fetch the file again from the pinned revision; the last lines give the command"),
    "content.other-release": Kind("warning", "Every shard has the published size and none the published hash: another upload of the same tensors.", "name its repository with `--online --repo REPO@COMMIT`, or pass its hashes with `--checksums FILE`"),
    "content.mixed-revisions": Kind("warning", "The download client's records name more than one commit.", "fetch all files from one commit; `--checksums auto` tells whether the contents differ"),
    "content.absent": Kind("warning", "A file that a hash list names is not there.", _COMPLETE),
    "content.unverified": Kind("warning", "Hashes were to be compared, but none is known for any shard.", "pass `--checksums FILE`, or `--online` to ask the Hub"),
    "content.list": Kind("warning", "A hash list that lies in the directory has entries that cannot be used.", "make the list again, or remove it"),
    "content.list-file": Kind("error", "The file given with `--checksums` is no hash list.", "pass the output of `sha256sum`, or JSON with `repo`, `revision` and `files`"),
    "content.changed": Kind("error", "A file changed while it was read.", "find out who writes to it, then run the same command again"),
    # The Hub.
    "online.offline": Kind("error", "The Hub may not or cannot be asked.", "check the network and `HF_ENDPOINT`, unset `HF_HUB_OFFLINE`, or use `--checksums auto` without `--online`"),
    "online.unknown-revision": Kind("error", "The Hub does not have this repository or commit, or its commit is not known here.", "name both with `--repo REPO@COMMIT`"),
    # A report page.
    "report.no-manifest": Kind("error", "There is no `dsv4convert.json`, so nothing tells what the conversion did.", "convert with this tool; `dsv4convert converted` checks checkpoints of other origin"),
    "report.not-json": Kind("error", "A file passed as a saved check is not what `converted --save` writes.", "save one with `dsv4convert converted DST ... --save check.json`"),
    "report.other": Kind("error", "A saved check is about another checkpoint.", "run `dsv4convert converted DST ... --save check.json` on this checkpoint"),
    "report.elsewhere": Kind("warning", "A saved check compared the contents of other files than those here, of these before they changed, or does not say of which.", "run `dsv4convert converted DST ... --read-data --save check.json` on these files"),
    # Running the model.
    "probe.unsupported": Kind("error", "The reference model does not run this release.", "the V4 family runs: V4-Flash, -0731, -DSpark, -Vision-Exp, V4-Pro and derivatives; `dsv4convert converted --reference` checks every release"),
    "probe.no-tokenizer": Kind("error", "There is no `tokenizer.json`, so no text can be encoded.", "pass token ids with `--ids`, or copy the file from the source"),
    "probe.tokenizer": Kind("error", "`tokenizer.json` cannot be read as a tokenizer.", "restore the file from the source, or pass token ids with `--ids`"),
    "probe.chat": Kind("error", "The tokenizer lacks a marker of the chat form.", "leave `--chat` out, or pass the ids of the encoded conversation with `--ids`"),
    "probe.prompt": Kind("error", "The prompt holds no token, or more than the model takes.", "pass another `--prompt` or other `--ids`"),
    "probe.token-id": Kind("error", "A token id of the prompt lies outside the vocabulary.", "pass ids below `vocab_size` of `config.json`"),
    "probe.no-vision": Kind("error", "Pictures were given, and the checkpoint has no vision tower.", "leave `--image` out, or probe a checkpoint of V4-Flash-Vision-Exp"),
    "probe.picture": Kind("error", "A file is no picture that can be decoded.", "pass a PNG, JPEG, WebP or GIF file that other programs open"),
    "probe.pictures": Kind("error", "The prompt has places for more or fewer pictures than were given, or there are too many.", "leave `<｜deepseek_image｜>` out of the text: the pictures then come before it; or pass `--image` once for each"),
    "probe.non-finite": Kind("error", "An activation is infinity or NaN.", "`dsv4convert converted DST --reference SRC --read-data` finds the weight; a clean download and a new conversion mend it"),
    "probe.no-draft": Kind("error", "The checkpoint has no draft layers to run.", "leave `--draft` out"),
    "probe.draft-short": Kind("error", "So few tokens leave no whole step of guesses to judge.", "pass a larger `--tokens`; 32 and more give figures worth reading"),
    "probe.draft-idle": Kind("warning", "No guess of the draft layers was right.", "compare `mtp.*` with the source: `dsv4convert converted DST --reference SRC --read-data`; a draft of random weights guesses nothing either"),
    "probe.draft-ended": Kind("warning", "The model ended its answer before a whole step of guesses could be judged.", "pass another prompt, one that is answered at length"),
    "probe.no-losses": Kind("warning", "The manifest does not say in which layers the repack lost nothing.", "restore `dsv4convert.json`, or convert again; without it their experts are held to the limit only"),
    "probe.differs": Kind("error", "A sublayer's output or choice is not the reference's, though it depends on no repacked weight.", "`dsv4convert converted DST --reference SRC --read-data` names the tensor; convert again"),
    "probe.error-limit": Kind("error", "A sublayer's output is further from the reference than repacked experts explain.", "`dsv4convert converted DST --reference SRC --read-data` names the tensor; convert again"),
    "golden.not-json": Kind("error", "The file is not a golden file of a known version.", "make one with `dsv4convert probe DST --prompt TEXT --golden FILE`"),
    "golden.pictures": Kind("error", "The pictures are not those of the golden file.", "pass the files that `dsv4convert probe` was given, in that order"),
    "golden.other": Kind("error", "The golden file is about another checkpoint.", "run `dsv4convert probe` on this checkpoint"),
    # A running server.
    "smoke.nothing": Kind("error", "No check could ask anything.", "choose others with `--only`, or give what the skipped ones need: their lines say what"),
    "smoke.unreachable": Kind("error", "No server answers at the address, or it stopped answering.", "check address and port, and the last lines of the server's log"),
    "smoke.not-ready": Kind("error", "A server answers, but says that it is not ready.", "wait for the line `ready after` of `dsv4convert serve`, or read the server's log"),
    "smoke.key": Kind("error", "The server asks for another key.", "pass `--api-key-file FILE` with the file that the server was started with"),
    "smoke.no-model": Kind("error", "The server lists no model.", "check that the address is that of SGLang's API"),
    "smoke.models": Kind("error", "The official client cannot find the served model.", "compare the page `/v1/models` with the name that the server was started with"),
    "smoke.open": Kind("error", "An endpoint answers without the right key.", "start the server with `dsv4convert serve --api-key-file FILE`; close the port until then"),
    "smoke.leak": Kind("error", "A page of the server shows the API key.", "make a new key, and start the server with the shim, which removes keys from these pages"),
    "smoke.answer": Kind("error", "A request was refused, failed, or its answer lacks what the protocol promises.", "read the server's log at the time of the request"),
    "smoke.timeout": Kind("error", "A request was not answered in time, though the server is alive.", "a first request compiles kernels: run again, or pass a larger `--timeout`"),
    "smoke.stream": Kind("error", "A stream ended without what the protocol promises.", "look for a proxy in between that cuts or buffers streams, and into the server's log"),
    "smoke.differs": Kind("error", "At temperature 0 a stream says something else than the same request without one.", "pass `--golden` to learn which of the two is right"),
    "smoke.unjudged": Kind("warning", "Two answers differ, and the server cannot show whether that was a tie.", "pass `--golden`, or run the suite on the same checkpoint without DSpark"),
    "smoke.usage": Kind("error", "Tokens are counted wrong.", "compare tokenizer and chat template with those of the checkpoint"),
    "smoke.turns": Kind("error", "Earlier turns of a conversation are lost.", "check the chat template that the server's log names"),
    "smoke.tools": Kind("error", "A function was not called, not legally, or its result was not used.", "check that the server parses calls as `deepseekv4`, or run with `--tool-choice required`"),
    "smoke.grammar": Kind("error", "An answer does not fit its JSON schema.", "check the grammar backend in the server's log"),
    "smoke.needle": Kind("error", "The model does not find what stands in a long prompt.", "compare with `dsv4convert probe`; a shorter `--length` that passes points to the indexer or the KV pools"),
    "smoke.load": Kind("error", "Requests at once fail, or are answered otherwise than alone.", "read the server's log; lower `--concurrency` of `serve` if memory ran out"),
    "smoke.golden": Kind("error", "The server picks a token that `probe` finds clearly less probable.", "run `dsv4convert converted DST --reference SRC --read-data`; if the checkpoint is right, report the kernels"),
    "smoke.template": Kind("error", "The server makes other tokens of a chat than `probe`.", "serve the tokenizer and the chat encoding that belong to the checkpoint"),
    "smoke.acceptance": Kind("error", "The draft guesses too little right to be of use.", "check that `main_proj` is on the skip list and `mtp.*` is right: `dsv4convert probe DST --draft`"),
    "smoke.picture-count": Kind("error", "A prompt with pictures has not as many tokens as the official layout makes of it.", "a text-only server loses pictures: look for the vision class in its log; otherwise compare with `dsv4convert probe --image`"),
    "smoke.picture-place": Kind("error", "A picture does not stand where the request has it.", "check that the chat encoding is the one that `dsv4convert serve` puts around SGLang's"),
    "smoke.picture-mixed": Kind("error", "An answer belongs to another picture, or to none.", "start the server without its prefix cache: if that helps, a cache knows pictures by too little"),
    "smoke.picture-unread": Kind("error", "The model does not name what a picture shows.", "pass `--random-weights` if the checkpoint is synthetic; otherwise compare with `dsv4convert probe --image`"),
    "smoke.picture-dropped": Kind("warning", "A picture where none may be was dropped without a word.", "put pictures into turns of the user or into tool results"),
    "smoke.placeholder": Kind("error", "Text that names a picture's placeholder is refused, or taken for a picture.", "check that the chat encoding is the one that `dsv4convert serve` puts around SGLang's"),
    "smoke.refusal": Kind("error", "A request that is wrong is not refused with status 400 and a sentence.", "read the server's log at the time of the request"),
    # Serving benchmarks.
    "bench.failed": Kind("error", "A run of SGLang's benchmark client ended with an error.", "the message ends with its last lines; run the same command again when the cause is gone"),
    "bench.tokenizer": Kind("error", "The tokenizer of a benchmark is missing, or brings code that would be executed.", "pass the converted checkpoint with `--tokenizer`; official tokenizers need no code"),
    "bench.cached": Kind("warning", "The prefix cache served prompts of a benchmark, so that its prefill looks faster than it is.", "let nobody else use the server meanwhile: it empties its cache only when idle"),
    "bench.requests": Kind("error", "Requests of a benchmark failed, so that its numbers mean nothing.", "read the server's log; run `dsv4convert smoke URL` first"),
    # What a script expects.
    "expect.mismatch": Kind("error", "A number of the checkpoint is not the one that `--expect` names.", "look at what changed; if the new number is right, change the `--expect` of your script"),
    # The SM80 shim, inside a server process.
    "shim.inactive": Kind("error", "The shim would not be active in the server.", "install this package into the Python that runs SGLang; another `sitecustomize` earlier on the path hides ours"),
    "shim.setting": Kind("error", "An environment variable of the shim has an unknown value.", "set it to one of the values named, or unset it"),
    "shim.file": Kind("error", "A file of SGLang that the shim builds on is not the one it was written against.", "install SGLang 0.5.16, or unset `ENABLE_DSV4_SM80` for stock SGLang; a difference that you have read can be accepted with `DSV4_SM80_ALLOW_HASH=<SHA-256 found>`"),
    "shim.target": Kind("error", "What a patch replaces is not there, or takes other parameters.", "install SGLang 0.5.16; for another version its row in `dsv4convert/runtime/contract.py` has to be ported"),
    "shim.late": Kind("error", "A module of SGLang was imported before the shim could patch it.", "put the shim's `activate` directory on PYTHONPATH of the process that starts"),
    "shim.option": Kind("error", "SGLang runs with an option that the kernels for SM80 do not support.", "change this option of SGLang to what is expected"),
    "shim.layout": Kind("error", "The expert layout of the checkpoint cannot be served by this backend or version.", "unset `DSV4_SM80_MOE`, or convert again: `dsv4convert convert SRC DST`, with `--experts mxfp4` for another backend"),
    "shim.fp8": Kind("error", "A model has an FP8 parameter, which SM80 cannot compute with.", "serve a checkpoint made by `dsv4convert convert`, with the skip list of `config.json` that it wrote"),
    "shim.experts": Kind("error", "Routed experts run in another class of SGLang than the backend's.", "start SGLang with quantization `fp8` and MoE runner backend `marlin` (`humming` for Humming)"),
    "shim.unfilled": Kind("error", "A parameter was not filled from the checkpoint.", "check the checkpoint: `dsv4convert converted DST`"),
    "shim.vision": Kind("error", "The vision tower of the checkpoint would not be served as it must be.", "start the server with `dsv4convert serve`, which points SGLang at the classes that see; the log above may hold `Ignore import error`"),
    # The machine.
    "cli.usage": Kind("error", "The options or arguments of a command are not right.", "`--help` lists them"),
    "io.read": Kind("error", "Reading failed.", "check the disk or the network file system, then run the same command again"),
    "io.write": Kind("error", "Writing failed.", "check the disk or the network file system, then run the same command again"),
    "env.files": Kind("error", "Too many files are open at once.", "raise the limit (`ulimit -n`), then run the same command again"),
    "env.memory": Kind("error", "The machine, or a limit, left too little memory.", "raise the limit (`ulimit -v`, the container's), or use fewer `--jobs`; the same command continues"),
    "env.missing": Kind("error", "A library that this command needs is not installed.", "install it as the message says"),
    "worker.killed": Kind("error", "A worker process ended without a result.", "the system may have run out of memory; run the same command again with fewer `--jobs`"),
}
# fmt: on
