# Somebody has a config.json of a Llama of 8 B parameters and one host of eight H100: does it fit, how
# long, what to do?
page docs/tutorial.md
$ partita advise config.json --cluster 1xdgx-h100 --tokens 100G -o start
= 100 G tokens take [\d.]+ days, \$[\d,]+
$ partita explain start/plan.json --what-if bandwidth=2x
= why:  compute on host0/gpu0 bounds the step
$ partita report start/plan.json -o report.html
= report written to report.html|report.html
$ partita export start/plan.json --check
= megatron
