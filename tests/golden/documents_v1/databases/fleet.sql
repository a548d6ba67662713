BEGIN TRANSACTION;
CREATE TABLE fleet_attempts (
        job INTEGER NOT NULL, number INTEGER NOT NULL, places TEXT NOT NULL, speed REAL NOT NULL,
        handle TEXT, started_s REAL NOT NULL, ended_s REAL, stop_s REAL, killed INTEGER NOT NULL
        DEFAULT 0, how TEXT NOT NULL DEFAULT '', PRIMARY KEY (job, number)) WITHOUT ROWID;
INSERT INTO "fleet_attempts" VALUES(1,1,'[{"server": "host1", "gpus": [0], "cpu_ids": [0, 1, 2], "cpus": 3.0, "memory_gb": 1.0}]',1.5,'{"job": 1, "number": 1}',1.79496245193326902384e+09,1.79496247193326902385e+09,NULL,0,'2 steps done');
INSERT INTO "fleet_attempts" VALUES(2,1,'[{"server": "host0", "gpus": [0, 1, 2, 3], "cpu_ids": [0, 1, 2, 3], "cpus": 4.0, "memory_gb": 4.0}]',1.0,'{"job": 2, "number": 1}',1.79496245193326902384e+09,NULL,NULL,0,'');
INSERT INTO "fleet_attempts" VALUES(3,1,'[{"server": "host1", "gpus": [0, 1, 2, 3], "cpu_ids": [0, 1, 2, 3], "cpus": 4.0, "memory_gb": 4.0}]',1.0,'{"job": 3, "number": 1}',1.79496248193326902392e+09,NULL,NULL,0,'');
INSERT INTO "fleet_attempts" VALUES(4,1,'[{"server": "host1", "gpus": [1, 2], "cpu_ids": [3, 4], "cpus": 2.0, "memory_gb": 2.0}]',1.0,'{"job": 4, "number": 1}',1.79496245193326902384e+09,1.79496248193326902392e+09,1.79496247193326902385e+09,0,'ended with exit code 0');
CREATE TABLE fleet_events (
        id INTEGER PRIMARY KEY, job INTEGER NOT NULL, at_s REAL NOT NULL, what TEXT NOT NULL);
INSERT INTO "fleet_events" VALUES(1,1,1.79496245193326902384e+09,'submitted');
INSERT INTO "fleet_events" VALUES(2,2,1.79496245193326902384e+09,'submitted');
INSERT INTO "fleet_events" VALUES(3,3,1.79496245193326902384e+09,'submitted');
INSERT INTO "fleet_events" VALUES(4,4,1.79496245193326902384e+09,'submitted');
INSERT INTO "fleet_events" VALUES(5,1,1.79496245193326902384e+09,'attempt 1 on host1: GPUs 0, 3 CPUs, 1 GB');
INSERT INTO "fleet_events" VALUES(6,2,1.79496245193326902384e+09,'attempt 1 on host0: GPUs 0,1,2,3, 4 CPUs, 4 GB');
INSERT INTO "fleet_events" VALUES(7,4,1.79496245193326902384e+09,'attempt 1 on host1: GPUs 1,2, 2 CPUs, 2 GB');
INSERT INTO "fleet_events" VALUES(8,1,1.79496247193326902385e+09,'finished: 2 steps done');
INSERT INTO "fleet_events" VALUES(9,4,1.79496247193326902385e+09,'told to stop: its GPUs go to others');
INSERT INTO "fleet_events" VALUES(10,4,1.79496248193326902392e+09,'ended with exit code 0');
INSERT INTO "fleet_events" VALUES(11,3,1.79496248193326902392e+09,'attempt 1 on host1: GPUs 0,1,2,3, 4 CPUs, 4 GB');
CREATE TABLE fleet_facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO "fleet_facts" VALUES('fleet','98a2c91db2c3');
INSERT INTO "fleet_facts" VALUES('epoch_s','1794962451.933269');
INSERT INTO "fleet_facts" VALUES('draining','');
CREATE TABLE fleet_jobs (
        id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE NOT NULL, spec TEXT NOT NULL,
        submitted_s REAL NOT NULL, state TEXT NOT NULL, note TEXT NOT NULL DEFAULT '',
        step INTEGER NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0,
        started_s REAL, finished_s REAL, attained_s REAL NOT NULL DEFAULT 0,
        attained_gpu_s REAL NOT NULL DEFAULT 0, preemptions INTEGER NOT NULL DEFAULT 0,
        migrations INTEGER NOT NULL DEFAULT 0, faults INTEGER NOT NULL DEFAULT 0,
        fault_step INTEGER NOT NULL DEFAULT -1, retry_s REAL NOT NULL DEFAULT 0,
        cancelled INTEGER NOT NULL DEFAULT 0);
INSERT INTO "fleet_jobs" VALUES(1,'key 0','{"name": "first", "command": ["true"], "folder": "/srv/jobs", "gpus": [[1, 1, ""]], "steps": 2, "progress": "lease", "sensitivity": {"format": "partita.sensitivity", "version": 1, "name": "first", "kind": "", "origin": "measured", "machine": "", "iteration_s": 1.0, "batch_size": 0, "dataset_samples": 0, "dataset_gb": null, "working_gb": 0.0, "gpu_types": [""], "gpu_type": [0, 0], "gpus": [0, 0], "cpus": [1.0, 3.0], "memory_gb": [1.0, 1.0], "speed": [1.0, 1.5], "measured": [true, true], "storage_mb_per_s": [null, null], "demand_cpus": null, "demand_memory_gb": null, "demand_speed": null, "restart_s": 0.0, "frontier_speed": [], "frontier_w": [], "storage_bandwidth_mb_per_s": null, "memory_cpus": [], "memory_gib_per_s": []}, "checkpoint": null, "environment": {}, "priority": 0.0, "tenant": "", "deadline_s": null, "retries": 3, "grace_s": 5.0}',1.79496245193326902384e+09,'finished','2 steps done',2,1,1.79496245193326902384e+09,1.79496247193326902385e+09,20.0,20.0,0,0,0,-1,0.0,0);
INSERT INTO "fleet_jobs" VALUES(2,'key 1','{"name": "second", "command": ["true"], "folder": "/srv/jobs", "gpus": [[4, 4, ""]], "steps": 10, "progress": "lease", "sensitivity": {"format": "partita.sensitivity", "version": 1, "name": "curve", "kind": "", "origin": "measured", "machine": "", "iteration_s": 1.0, "batch_size": 0, "dataset_samples": 0, "dataset_gb": null, "working_gb": 0.0, "gpu_types": [""], "gpu_type": [0], "gpus": [0], "cpus": [1.0], "memory_gb": [1.0], "speed": [1.0], "measured": [true], "storage_mb_per_s": [null], "demand_cpus": null, "demand_memory_gb": null, "demand_speed": null, "restart_s": 0.0, "frontier_speed": [], "frontier_w": [], "storage_bandwidth_mb_per_s": null, "memory_cpus": [], "memory_gib_per_s": []}, "checkpoint": null, "environment": {}, "priority": 0.0, "tenant": "", "deadline_s": null, "retries": 3, "grace_s": 5.0}',1.79496245193326902384e+09,'running','',2,1,1.79496245193326902384e+09,NULL,0.0,0.0,0,0,0,-1,0.0,0);
INSERT INTO "fleet_jobs" VALUES(3,'key 2','{"name": "third", "command": ["true"], "folder": "/srv/jobs", "gpus": [[4, 4, ""]], "steps": 10, "progress": "lease", "sensitivity": {"format": "partita.sensitivity", "version": 1, "name": "curve", "kind": "", "origin": "measured", "machine": "", "iteration_s": 1.0, "batch_size": 0, "dataset_samples": 0, "dataset_gb": null, "working_gb": 0.0, "gpu_types": [""], "gpu_type": [0], "gpus": [0], "cpus": [1.0], "memory_gb": [1.0], "speed": [1.0], "measured": [true], "storage_mb_per_s": [null], "demand_cpus": null, "demand_memory_gb": null, "demand_speed": null, "restart_s": 0.0, "frontier_speed": [], "frontier_w": [], "storage_bandwidth_mb_per_s": null, "memory_cpus": [], "memory_gib_per_s": []}, "checkpoint": null, "environment": {}, "priority": 0.0, "tenant": "", "deadline_s": null, "retries": 3, "grace_s": 5.0}',1.79496245193326902384e+09,'running','',0,1,1.79496248193326902392e+09,NULL,0.0,0.0,0,0,0,-1,0.0,0);
INSERT INTO "fleet_jobs" VALUES(4,'key 3','{"name": "fourth", "command": ["true"], "folder": "/srv/jobs", "gpus": [[2, 2, ""]], "steps": 10, "progress": "lease", "sensitivity": {"format": "partita.sensitivity", "version": 1, "name": "curve", "kind": "", "origin": "measured", "machine": "", "iteration_s": 1.0, "batch_size": 0, "dataset_samples": 0, "dataset_gb": null, "working_gb": 0.0, "gpu_types": [""], "gpu_type": [0], "gpus": [0], "cpus": [1.0], "memory_gb": [1.0], "speed": [1.0], "measured": [true], "storage_mb_per_s": [null], "demand_cpus": null, "demand_memory_gb": null, "demand_speed": null, "restart_s": 0.0, "frontier_speed": [], "frontier_w": [], "storage_bandwidth_mb_per_s": null, "memory_cpus": [], "memory_gib_per_s": []}, "checkpoint": null, "environment": {}, "priority": 0.0, "tenant": "", "deadline_s": null, "retries": 3, "grace_s": 5.0}',1.79496245193326902384e+09,'waiting','ended with exit code 0',2,1,1.79496245193326902384e+09,NULL,20.0,60.0,1,0,0,-1,0.0,0);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('fleet_jobs',4);
COMMIT;
