python -m torch.distributed.launch --nproc_per_node 8 --nnodes 1 --node_rank 0 --master_addr localhost --master_port 6000 \
       pretrain_gpt.py \
       --model-parallel-size 2 \
       --pipeline-model-parallel-size 2 \
       --num-layers 24 --batch-size 4 --micro-batch-size 4 --global-batch-size 16 --DDP-impl local --activations-checkpoint-method uniform
