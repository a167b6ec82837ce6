"""SGLang's options that aiakq does not need, or does not have. Names of 0.5.23 and older."""

from __future__ import annotations

from aiakq.terminal.translation.rules import Rule, ignored, lost


def _names(text: str) -> list[str]:
    return text.split(", ")


def rules() -> tuple[Rule, ...]:
    """Return the rules of all options that nothing replaces."""
    return (*_LOST, *_IGNORED)


_LOST: tuple[Rule, ...] = (
    *lost(
        "a model reads images if docs/images.md names its family; --limit-mm-per-prompt limits them",
        *_names("enable-multimodal?, mm-process-config, limit-mm-data-per-request"),
    ),
    *lost(
        "responses have no field for it",
        *_names(
            "enable-return-hidden-states?, return-hidden-states-mode, enable-return-aux-hidden-states?, "
            "return-aux-hidden-state-layer-ids*, enable-return-routed-experts?, enable-return-indexer-topk?, "
            "return-input-ids?, return-output-ids?"
        ),
    ),
    *lost(
        "code from requests is not run",
        *_names("enable-custom-logit-processor?"),
    ),
    *lost(
        "outputs have no watermark",
        *_names("enable-watermark?, watermark-config"),
    ),
    *lost(
        "quantize the model once, with aiakq quantize",
        *_names(
            "modelopt-quant, quantize-and-serve?, modelopt-checkpoint-restore-path, "
            "modelopt-checkpoint-save-path, modelopt-export-path, rl-quant-profile"
        ),
    ),
    *lost(
        "weights come from files",
        *_names(
            "remote-instance-weight-loader-seed-instance-ip, "
            "remote-instance-weight-loader-seed-instance-service-port, "
            "checkpoint-engine-wait-weights-before-ready?, modelexpress-config, custom-weight-loader*, "
            "decrypted-config-file, decrypted-draft-config-file"
        ),
    ),
    *lost(
        "experts stay in one format on one device",
        *_names("kt-weight-path, kt-method =AMXINT4"),
    ),
    *lost(
        "diffusion models are not supported",
        *_names("dllm-algorithm, dllm-algorithm-config"),
    ),
    *lost(
        "prefill and decoding are not disaggregated",
        *_names(
            "disaggregation-mode =null, encoder-only?, language-only?, encoder-urls*, encoder-register-urls*, "
            "enable-pdmux?"
        ),
    ),
    *lost(
        "the server speaks HTTP/1.1 only",
        *_names("grpc-mode?, smg-grpc-mode?, grpc-port, enable-http2?"),
    ),
    *lost(
        "give the certificate's key without a password",
        *_names("ssl-keyfile-password"),
    ),
    *lost(
        "a template of a request could run for any time",
        *_names("trust-request-chat-template?"),
    ),
    *lost(
        "there are no other templates than the model's and --chat-template",
        *_names("completion-template, hf-chat-template-name"),
    ),
    *lost(
        "prompts that are too long are refused, never cut",
        *_names("allow-auto-truncate?"),
    ),
    *lost(
        "the server runs no tools",
        *_names("tool-server"),
    ),
    *lost(
        "there is one process of the engine, and no plug-ins",
        *_names(
            "sidecar, sidecar-args*, forward-hooks*, msprobe-dump-config, debug-tensor-dump-output-folder, "
            "debug-tensor-dump-input-file"
        ),
    ),
    *lost(
        "answers of a draft are never accepted below certainty",
        *_names("speculative-accept-threshold-single =1.0, speculative-accept-threshold-acc =1.0"),
    ),
    *lost(
        "the whitespace of JSON is all or none: --structured-outputs-config",
        *_names("constrained-json-whitespace-pattern, constrained-json-max-whitespace-cnt"),
    ),
    *lost(
        "sessions and stored responses are not kept",
        *_names("enable-streaming-session?, enable-response-store?"),
    ),
    *lost(
        "one text is scored per request",
        *_names("enable-mis?"),
    ),
    *lost(
        "thinking_token_budget of a request ends a thought",
        *_names("enable-strict-thinking?"),
    ),
    *lost(
        "the model's config.json is read",
        *_names("model-config-parser =auto|hf"),
    ),
    *lost(
        "one command starts the ranks of several machines: --distributed-executor-backend ray",
        *_names("node-rank =0, dist-init-addr nccl-init-addr"),
    ),
    *lost(
        "an adapter changes the modules that its file names",
        *_names("lora-target-modules*, experts-shared-outer-loras?, uno-lora-path"),
    ),
    *lost(
        "preemption by priority has no threshold",
        *_names("priority-scheduling-preemption-threshold =10"),
    ),
)
_IGNORED: tuple[Rule, ...] = (
    *ignored(
        "on a CPU answers never depend on the batch, and on a GPU within what its libraries promise",
        *_names("enable-deterministic-inference?"),
    ),
    *ignored(
        "the log is set up by --uvicorn-log-level, --log-format and --log-config-file",
        *_names(
            "log-requests-level =2, log-requests-format =text, log-requests-target*, show-time-cost?, "
            "crash-dump-folder, decode-log-interval =40, enable-request-time-stats-logging?, "
            "gc-warning-threshold-secs"
        ),
    ),
    *ignored(
        "with -tp, experts are always distributed whole",
        *_names(
            "ep-size expert-parallel-size ep, moe-dense-tp-size, enable-eplb?, eplb-algorithm =auto, "
            "ep-num-redundant-experts, ep-dispatch-algorithm, init-expert-location =trivial, moe-a2a-backend "
            "=none, deepep-mode =auto, deepep-config, enable-two-batch-overlap?"
        ),
    ),
    *ignored(
        "one library, llguidance, enforces every grammar",
        *_names("grammar-backend"),
    ),
    *ignored(
        "devices are chosen with CUDA_VISIBLE_DEVICES, processors by their NUMA nodes",
        *_names(
            "base-gpu-id, gpu-id-step, random-seed, mlx-enable-sampling?, soft-watchdog-timeout, "
            "sleep-on-idle?, numa-node*, gc-threshold*"
        ),
    ),
    *ignored(
        "prefill and decoding are not disaggregated",
        *_names(
            "decoupled-spec-bind-endpoint, decoupled-spec-connect-endpoints*, decoupled-spec-rank, "
            "decoupled-spec-role =null, disaggregation-decode-allocation-policy =early, "
            "disaggregation-transfer-backend =mooncake, disaggregation-enable-kv-checksum?, "
            "disaggregation-bootstrap-port =8998, disaggregation-ib-device, "
            "disaggregation-decode-enable-radix-cache?, disaggregation-decode-enable-offload-kvcache?, "
            "disaggregation-decode-retraction-backup, num-reserved-decode-tokens =512, "
            "disaggregation-decode-extra-slots, disaggregation-decode-polling-interval, enable-pd-role-switch?, "
            "optimistic-prefill-attempts, language-model-only?, encoder-transfer-backend =auto, "
            "encoder-bootstrap-port =8997, enable-adaptive-dispatch-to-encoder?, pdmux-config-path, "
            "sm-group-num =8, disaggregation-decode-host-receive-threshold"
        ),
    ),
    *ignored(
        "kernels, graphs and collectives are selected when the model is loaded, and shown in the start-up table",
        *_names(
            "enable-fp32-lm-head?, enable-tf32-matmul?, enable-memory-saver?, enable-weights-cpu-backup?, "
            "enable-draft-weights-cpu-backup?, enable-encoder-swa-bounded-replay?, "
            "enable-decoder-swa-bounded-replay?, sampling-mask-max-tokens =4096, disable-outlines-disk-cache?, "
            "attention-backend, decode-attention-backend, enable-lean-attention?, enable-nvidia-megakernel?, "
            "enable-amd-monokernel?, prefill-attention-backend, prefill-kv-cache-dequant-dtype =auto, "
            "fp8-gemm-backend =auto, fp4-gemm-backend =auto, bf16-gemm-backend =auto, dsa-prefill-backend, "
            "dsv4-prefill-backend =auto, dsa-triton-union, dsa-decode-backend, dsv4-attn-backend =auto, "
            "dsa-paged-mqa-logits-backend =auto, dsa-topk-backend =sgl-kernel, disable-flashinfer-autotune?, "
            "flashinfer-autotune-skip-ops*, triton-attention-reduce-in-fp32?, triton-attention-num-kv-splits "
            "=8, triton-attention-split-tile-size, flashinfer-mla-disable-ragged?, enable-fused-qk-norm-rope?, "
            "enable-precise-embedding-interpolation?, enable-deepseek-v4-fp4-indexer?, "
            "enable-dsa-fused-indexer?, mamba-backend =triton, mamba-ssm-dtype, mamba-max-states-per-path, "
            "enable-mamba-cache-stochastic-rounding?, mamba-cache-philox-rounds, mamba-radix-cache-strategy "
            "=auto, mamba-track-interval =256, enable-int8-mamba-checkpoint?, int8-mamba-ckpt-size, "
            "linear-attn-backend =triton, linear-attn-decode-backend, linear-attn-prefill-backend, "
            "linear-attn-verify-backend, enable-linear-replayssm?, linear-replayssm-cache-len =16, "
            "enable-linear-replayssm-spec?, cuda-graph-config, cuda-graph-backend-decode, "
            "cuda-graph-backend-prefill, cuda-graph-max-bs-prefill, cuda-graph-max-seq-len-prefill, "
            "cuda-graph-bs-prefill*, cuda-graph-prefill-max-context context-bucket, "
            "disable-prefill-cuda-graph?, disable-decode-cuda-graph?, disable-cuda-graph-padding?, "
            "enable-profile-cuda-graph?, enable-cudagraph-gc?, debug-cuda-graph?, enable-torch-compile?, "
            "enable-torch-compile-debug-mode?, torch-compile-max-bs =32, enable-layerwise-nvtx-marker?, "
            "enable-nccl-nvls?, enable-symm-mem?, disable-custom-all-reduce?, enable-mscclpp?, "
            "enable-torch-symm-mem?, enable-scattered-sconv?, pre-warm-nccl?, boundary-reduction =auto, "
            "enable-quant-communications?, enforce-disable-flashinfer-allreduce-fusion?, "
            "flashinfer-allreduce-fusion-backend, enable-aiter-allreduce-fusion?, "
            "disable-aiter-allreduce-fusion-in-prefill?, disable-aiter-allreduce-fusion-in-decode?, "
            "enable-fused-moe-sum-all-reduce?, enable-w4a4-mxfp4-megamoe?, deepep-v2-mode =direct, "
            "moe-runner-backend =auto, flashinfer-mxfp4-moe-precision =default, fuseep-mode =2, "
            "deepep-dispatcher-output-dtype =auto, flashinfer-a2a-dispatch-type, eplb-rebalance-num-iterations "
            "=1000, eplb-rebalance-layers-per-chunk, eplb-min-rebalancing-utilization-threshold, "
            "expert-distribution-recorder-mode, expert-distribution-recorder-buffer-size, "
            "expert-balancedness-report-mode =off, elastic-ep-backend, enable-elastic-expert-backup?, "
            "mooncake-ib-device, enable-waterfill?, elastic-ep-join-mode, elastic-ep-scale-timeout =600, "
            "disable-flashinfer-cutlass-moe-fp4-allgather?, disable-shared-experts-fusion?, "
            "enforce-shared-experts-fusion?, enable-paged-experts?, paged-experts-num-resident, kt-cpuinfer, "
            "kt-threadpool-count =2, kt-num-gpu-experts, kt-max-deferred-experts-per-token, "
            "enable-single-batch-overlap?, tbo-token-distribution-threshold =0.48, cpu-offload-gb, "
            "offload-group-size, offload-num-in-group, offload-prefetch-step, offload-mode =cpu, "
            "ple-offload-embedding?, ple-offload-backend =pinned, ple-offload-dir, dllm-fdfo?, "
            "rl-on-policy-target"
        ),
    ),
    *ignored(
        "one kernel computes all adapters of a step",
        *_names(
            "enable-lora-overlap-loading?, lora-eviction-policy =lru, lora-backend =csgmv, max-lora-chunk-size "
            "=16, lora-use-virtual-experts?, lora-strict-loading?, lora-drain-wait-threshold"
        ),
    ),
    *ignored(
        "pages of the KV cache stay in the memory of the compute device, and are managed by one pool",
        *_names(
            "radix-eviction-policy =lru, radix-eviction-policy-config, enable-page-major-kv-layout?, "
            "enable-unified-memory?, enable-session-radix-cache?, radix-cache-backend, "
            "enable-hierarchical-cache? enable-hicache, hicache-host-memory-mode =cache, hicache-ratio, "
            "hicache-size, hicache-host-memory-fraction =0.8, hicache-write-policy =write_through, "
            "hicache-io-backend =kernel, hicache-mem-layout =page_first, hicache-storage-backend, "
            "hicache-storage-prefetch-policy =timeout, hicache-storage-backend-extra-config, "
            "hicache-storage-prefetch-retry-poll-interval =8, hicache-storage-prefetch-retry-max-attempts =8, "
            "enable-unified-cache-external-linker?, unified-cache-external-linker-backend =mooncake, "
            "unified-cache-external-linker-config, enable-linker-mla-dedup?, enable-hisparse?, hisparse-config "
            "hierarchical-sparse-attention-extra-config, enable-lmcache?, lmcache-config-file, enable-flexkv?, "
            "flexkv-config-file"
        ),
    ),
    *ignored(
        "images are read as the files of the model say (docs/images.md)",
        *_names(
            "mm-attention-backend, enable-broadcast-mm-inputs-process?, enable-prefix-mm-cache?, "
            "mm-enable-dp-encoder?, mm-processor-worker-num, mm-io-worker-num, allowed-media-domains*, "
            "media-url-max-file-size-mb =64, mm-preprocess-cache-size-mb, trust-mm-content-hashes?, "
            "enable-mm-global-cache?, image-processor-backend =auto, mm-global-cache-backend =mooncake, "
            "disable-fast-image-processor?, mm-feature-transport"
        ),
    ),
    *ignored(
        "it changes how weights are read, not what they are",
        *_names(
            "model-loader-extra-config ={}, quantization-param-path, qsa-indexer-dtype =auto, "
            "startup-weight-load-mode =serial, weight-loader-disable-mmap?, "
            "weight-loader-prefetch-checkpoints?, weight-loader-prefetch-num-threads =4, "
            "weight-loader-drop-cache-after-load?, remote-instance-weight-loader-send-weights-group-ports*, "
            "remote-instance-weight-loader-backend =nccl, "
            "remote-instance-weight-loader-start-seed-via-transfer-engine?, engine-info-bootstrap-port =6789, "
            "model-checksum~, delete-ckpt-after-loading?, weight-cache-mode =off, weight-cache-socket, "
            "weight-cache-timeout =1800"
        ),
    ),
    *ignored(
        "metrics are always on, and described in docs/operations.md",
        *_names(
            "enable-metrics?, smg-http-sidecar-port grpc-http-sidecar-port, enable-mfu-metrics?, "
            "enable-metrics-for-all-schedulers?, load-snapshot-publish-interval =15, "
            "tokenizer-metrics-custom-labels-header =x-custom-labels, tokenizer-metrics-allowed-custom-labels*, "
            "extra-metric-labels, bucket-time-to-first-token*, bucket-inter-token-latency*, "
            "bucket-e2e-request-latency*, prompt-tokens-buckets*, generation-tokens-buckets*, kv-events-config, "
            "load-publish-endpoint, enable-forward-pass-metrics?, forward-pass-metrics-worker-id, "
            "forward-pass-metrics-ipc-name, enable-trace?, trace-modules =request, otlp-service-name, "
            "export-metrics-to-file?, export-metrics-to-file-dir, kv-canary =none, kv-canary-sweep-interval, "
            "debug-tensor-dump-layers*"
        ),
    ),
    *ignored(
        "ranks share the work of a layer as --tensor-parallel-math says",
        *_names(
            "nccl-port, gated-launch-port, dcp-size decode-context-parallel-size, pp-max-micro-batch-size, "
            "pp-async-batch-depth, attn-dp-size attention-data-parallel-size, load-balance-method =auto, "
            "attn-cp-size attention-context-parallel-size, moe-dp-size moe-data-parallel-size, dwdp-size, "
            "dcp-comm-backend, dcp-replicate-q-proj?, enable-prefill-cp?, cp-strategy, "
            "enable-dsa-cache-layer-split?, enable-cp-decode-attn-tp?, enable-kv-cache-sharding?, "
            "enable-dp-attention-local-control-broadcast?, enable-dp-lm-head?, enable-tp-lm-head-all-to-all?, "
            "enable-attn-tp-input-scattered?, enable-shared-experts-attn-tp?, shared-experts-tp-size, "
            "enable-dense-mlp-attn-tp?, enable-layernorm-sp?, enable-megamoe-for-layernorm-sp?, "
            "disable-attn-tp-gather?, enable-p2p-check?, elastic-ep-join-rank-offset, elastic-ep-initial-size, "
            "max-ep-size"
        ),
    ),
    *ignored(
        "it changes the order and the size of steps; see --max-num-batched-tokens",
        *_names(
            "prefill-decode-interval, prefill-decode-interval-min-bs, enable-dynamic-chunking?, "
            "max-prefill-tokens =16384, prefill-max-requests, schedule-policy =fcfs, "
            "disable-priority-preemption?, default-priority-value, abort-on-priority-when-disabled?, "
            "schedule-low-priority-values-first?, retraction-policy =length, schedule-conservativeness, "
            "c128-page-size =16, swa-full-tokens-ratio, swa-prefix-tails, disable-hybrid-swa-memory?, "
            "prefill-only-disable-kv-cache?, disable-chunked-prefix-cache?, num-continuous-decode-steps, "
            "scheduler-recv-interval, enable-mixed-chunk?, max-mamba-cache-size, mamba-full-memory-ratio, "
            "enable-prefill-delayer?, prefill-delayer-max-delay-passes =30, "
            "prefill-delayer-token-usage-low-watermark, prefill-delayer-forward-passes-buckets*, "
            "prefill-delayer-wait-seconds-buckets*, prefill-delayer-queue-min-ratio, "
            "prefill-delayer-max-delay-ms, min-free-slots-delay"
        ),
    ),
    *ignored(
        "it changes how the HTTP processes work, not what they answer",
        *_names(
            "tokenizer-backend =huggingface, tokenizer-worker-num, detokenizer-worker-num, "
            "enable-http-worker-reuseport?, grpc-response-timeout-secs =300, skip-server-warmup?, warmups, "
            "http2-max-concurrent-streams =200, http2-initial-connection-window-size, weight-version =default, "
            "file-storage-path, enable-cache-report?, strip-thinking-cache?, asr-max-buffer-seconds =60, "
            "asr-max-concurrent-sessions =32, batch-notify-size =16, incremental-streaming-output?, "
            "enable-dynamic-batch-tokenizer?, dynamic-batch-tokenizer-batch-size =32, "
            "dynamic-batch-tokenizer-batch-timeout =0.002, enable-tokenizer-batch-encode?, "
            "disable-tokenizer-batch-decode?"
        ),
    ),
    *ignored(
        "it changes speed or memory only; drafts never change an answer here",
        *_names(
            "speculative-draft-model-revision, speculative-draft-load-format, speculative-dflash-block-size, "
            "speculative-domino-candidate-pool-size =2048, speculative-dspark-block-size, "
            "speculative-dspark-sps-table-path, speculative-dspark-confidence-sts-path, "
            "speculative-dspark-align-verify-tokens-to-graph-tier?, speculative-use-rejection-sampling?, "
            "speculative-use-block-verification?, speculative-token-map, speculative-attention-mode =prefill, "
            "speculative-draft-attention-backend, speculative-dsa-topk-backend =sgl-kernel, "
            "speculative-draft-kv-cache-dtype, speculative-draft-window-size, speculative-draft-sink-size, "
            "speculative-moe-runner-backend, speculative-moe-a2a-backend, "
            "speculative-enable-w4a4-mxfp4-megamoe?, enable-multi-layer-eagle?, speculative-adaptive?, "
            "speculative-adaptive-config, spec-trace-dir, speculative-ngram-min-bfs-breadth, "
            "speculative-ngram-max-bfs-breadth =10, speculative-ngram-match-type =BFS, "
            "speculative-ngram-capacity, speculative-ngram-external-corpus-path, "
            "speculative-ngram-external-sam-budget, speculative-ngram-external-corpus-max-tokens =10000000"
        ),
    ),
    *ignored(
        "kernels, graphs and collectives are selected when the model is loaded, and shown in the start-up table",
        *_names(
            "enable-ep-moe?, enable-deepep-moe?, enable-flashinfer-mla?, enable-mla?, disable-mla?, "
            "disable-flashinfer?, disable-flashinfer-sampling?, disable-disk-cache?, "
            "disable-regex-jump-forward?, enable-p2p?, stream-output?, mm-per-request-timeout, "
            "max-micro-batch-size, hybrid-kvcache-ratio, enable-dp-attention?, monokernel-backend, "
            "enable-flashinfer-allreduce-fusion?, enable-flashinfer-cutlass-moe?, "
            "enable-flashinfer-trtllm-moe?, sampling-backend, model-type, kv-canary-real-data, "
            "enable-flashmla?, enable-llama4-multimodal?"
        ),
    ),
)
