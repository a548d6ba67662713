srun --ntasks-per-node=1 bash -c "torchrun --nproc_per_node 8 --nnodes 2 --node_rank \$SLURM_NODEID p.py --tensor-model-parallel-size 8 --num-layers 32 --micro-batch-size 1 --global-batch-size 16"
