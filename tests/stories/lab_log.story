# A lab has a log of its jobs and wants to know which policy lets people wait least.
page docs/tasks/policy-for-my-lab.md
$ partita fleet simulate lab.csv --cluster 1x8xa100 --policy fifo:fair,las:fair
= ^1  fifo:fair +[\d.]+
