WORLD=`expr 8 \* 2`
GBS=$(( 4*WORLD ))
p.py --num-layers 24 --micro-batch-size 1 --global-batch-size $GBS
