MODEL=${1:-small}
if [ "$MODEL" = small ]; then
  NL=12; TP=1
else
  NL=48; TP=8
fi
torchrun --nproc-per-node 8 pretrain.py --num-layers $NL --tensor-model-parallel-size $TP --micro-batch-size 1
