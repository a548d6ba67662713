run() {
  torchrun --nproc-per-node 8 p.py --num-layers 24 --micro-batch-size 1 --tensor-model-parallel-size 2 "$@"
}
run --global-batch-size 64
