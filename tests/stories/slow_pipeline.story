# Somebody has a pipeline that is slower than expected.
page docs/tasks/why-is-my-pipeline-slow.md
$ partita plan gpt-small --cluster 4xa100 --microbatches 8 --planner uniform -o slow.json
= 4 stages, 1f1b
$ partita explain slow.json --what-if microbatches=2x --what-if schedule=zero-bubble
= do:   partita plan slow.json --microbatches 16 reaches
