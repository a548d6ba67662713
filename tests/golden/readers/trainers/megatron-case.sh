case $1 in
 7b) ARGS="--num-layers 32 --micro-batch-size 2";;
 70b) ARGS="--num-layers 80 --micro-batch-size 1";;
esac
torchrun --nproc-per-node 8 pretrain.py $ARGS --tensor-model-parallel-size 4
