ARGS=(
    --tensor-model-parallel-size 2   # tp
    --pipeline-model-parallel-size 2 # pp
    # --context-parallel-size 2
    --num-layers 24
    --micro-batch-size 1
)
torchrun --nproc_per_node 8 --nnodes 1 p.py "${ARGS[@]}" 2>&1 | tee log.txt
