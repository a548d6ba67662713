# Somebody has a training loop of their own and two processes.
page docs/tutorial.md
$ partita profile gpt_ported:build -o gpt.json
= written to gpt.json
$ partita plan gpt.json --devices 2 --microbatches 4 --iterations 5 -o gpt.plan.json
= no plan can beat [\d.]+ ms
$ partita run gpt.plan.json -- gpt_ported.py 3
= run       step 3/3  loss [\d.]+ -> [\d.]+
