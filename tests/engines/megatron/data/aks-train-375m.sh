#!/bin/bash
# The launch script of Azure's megatron-training chart with its seed's default size: Azure/ai-infrastructure-on-azure,
# facts as read at 2026-08 (sizes, training arguments and environment; paths as the chart mounts them).
set -xe

MODEL_SIZE="375m"
NUM_LAYERS=12; HIDDEN_SIZE=512; NUM_ATTENTION_HEADS=8; SEQ_LENGTH=1024
TENSOR_MODEL_PARALLEL_SIZE=1
PIPELINE_MODEL_PARALLEL_SIZE=1
DATA=/data/slimpajama
USE_SHARP=${USE_SHARP:-0}

export CUDA_DEVICE_MAX_CONNECTIONS=1

DISTRIBUTED_ARGS=(
    --nproc_per_node 8
    --nnodes 2
    --rdzv_id $RDZV_ID
    --rdzv_backend c10d
    --rdzv_endpoint $MASTER_ADDR:$MASTER_PORT
)

GPT_MODEL_ARGS=(
    --num-layers $NUM_LAYERS
    --hidden-size ${HIDDEN_SIZE}
    --num-attention-heads "$NUM_ATTENTION_HEADS"
    --seq-length $SEQ_LENGTH
    --max-position-embeddings 2048
    --attention-backend auto   # flash, fused or unfused
)

TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 512
    --train-iters ${ITERATIONS:-1500}
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --fp16
    --lr 6.0e-5
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --lr-warmup-fraction .001
    --lr-decay-iters 430000
    --use-distributed-optimizer
)

MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size $TENSOR_MODEL_PARALLEL_SIZE
    --pipeline-model-parallel-size $PIPELINE_MODEL_PARALLEL_SIZE
    --sequence-parallel
)

DATA_ARGS="--vocab-file $DATA/bpe/vocab.json --merge-file $DATA/bpe/merges.txt \
    --train-data-path 1.0 $DATA/preprocessed/a 1.0 $DATA/preprocessed/b \
    --valid-data-path 1.0 $DATA/preprocessed/y --test-data-path 1.0 $DATA/preprocessed/z \
    --data-cache-path /data/datacache"

EVAL_AND_LOGGING_ARGS=(
    --log-interval 10
    --save-interval 100
    --eval-interval 100
    --eval-iters 10
    --save /data/checkpoints --load /data/checkpoints
    --ckpt-format torch_dist
    --ckpt-fully-parallel-load
    --use-persistent-ckpt-worker
    --ckpt-assume-constant-structure
    --tensorboard-dir /data/logs
)

torchrun "${DISTRIBUTED_ARGS[@]}" /megatron-lm/pretrain_gpt.py \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" \
    $DATA_ARGS \
    "${EVAL_AND_LOGGING_ARGS[@]}" --use-sharp
