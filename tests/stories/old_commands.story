# Users of PipeDream and Baechi type what they know.
page docs/tasks/coming-from.md
$ partita convert resnet50 graph.txt --to pipedream
= graph.txt
$ partita plan graph.txt --cluster 1x4xv100 --bandwidth host=1e10 --objective pipedream-repaired --planner pipedream -o flat.plan.json
= no plan can beat
$ partita convert flat.plan.json gpus=4.txt
= gpus=4.txt
$ partita plan resnet50 --cluster 2xv100 --planner m-etf --objective makespan-parallel --memory-factor 0.5 -o placed.plan.json
= m-etf
