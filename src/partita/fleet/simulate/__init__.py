"""Playing a trace on a cluster: by the released rules, or by ours."""
