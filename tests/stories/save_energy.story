# Somebody has the times of four stages and wants to know how much energy slower clocks save.
page docs/tasks/save-energy.md
$ partita energy frontier --stages 65.7,58.2,56.1,58.1ms --backward 2x --device a100 --microbatches 8 --points 6 -o stages.json
= \(-[\d.]+ %, no slowdown\)
