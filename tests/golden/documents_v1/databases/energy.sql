BEGIN TRANSACTION;
CREATE TABLE energy_answers (
        job TEXT NOT NULL, key TEXT NOT NULL, failure TEXT NOT NULL, ours INTEGER NOT NULL,
        PRIMARY KEY (job, key)) WITHOUT ROWID;
INSERT INTO "energy_answers" VALUES('2026-11-18-00-40-52+dp1+pp1+tp1+perseus','69d2db29be65499d0bdd041045359376d1182cd797b9b4147d60f86945ad3c34','',0);
CREATE TABLE energy_documents (key TEXT PRIMARY KEY, body TEXT NOT NULL);
INSERT INTO "energy_documents" VALUES('95d8eff6c68845e664088403f4ddcd30fbf60b77a33816802ecf28cfa94d8dbf','{"scheduler": "perseus", "options": {"points": 5}}');
INSERT INTO "energy_documents" VALUES('69d2db29be65499d0bdd041045359376d1182cd797b9b4147d60f86945ad3c34','{
"format": "partita.frontier",
"version": 1,
"devices": ["gpu0"],
"num_instructions": 4,
"time_s": [6.0,6.8,8.4,9.2,10.8],
"energy_j": [1800.0,1770.0,1710.0,1680.0,1620.0],
"bound_j": [1800.0,1770.0,1710.0,1679.9999999999995,1620.0],
"clock_mhz": [1400.0,1400.0,1400.0,1400.0,700.0,1400.0,1400.0,1400.0,1400.0,1400.0,700.0,700.0,700.0,1400.0,700.0,700.0,700.0,700.0,700.0,700.0],
"all_max_s": 6.0,
"all_max_j": 1800.0,
"fastest_s": 6.0,
"best_s": 10.8,
"origin": "measured",
"solution": null,
"profile": null
}
');
INSERT INTO "energy_documents" VALUES('aed9a0391ad54cc876dc9761bc02d1a0d793ab3f955732b441a6b2d6bec7dfef','{"scheduler": "two-frequencies", "options": {"forward_freq": 1200, "backward_freq": 1400}}');
INSERT INTO "energy_documents" VALUES('cb551c3e79959c4464ff32e6514dffe96a364abd41d3161cb453d95010516fd1','{"scheduler": "all-max", "options": {}}');
CREATE TABLE energy_events (
        job TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL,
        PRIMARY KEY (job, seq)) WITHOUT ROWID;
INSERT INTO "energy_events" VALUES('2026-11-18-00-40-52+dp1+pp1+tp1+perseus',1,'rank','{"rank":0,"dp_rank":0,"pp_rank":0,"tp_rank":0,"available_frequencies":[1200,1400],"pipe_schedule":null,"device_type":"","device":"","origin":"measured","blocking_w":null}');
INSERT INTO "energy_events" VALUES('2026-11-18-00-40-52+dp1+pp1+tp1+perseus',2,'settled','{"version": 2, "stragglers": [{"rank": null, "dp_rank": null, "slowdown": 2.0, "iteration_s": null}]}');
INSERT INTO "energy_events" VALUES('2026-11-18-00-40-56+dp1+pp2+tp1+two-frequencies',1,'rank','{"rank":0,"dp_rank":0,"pp_rank":0,"tp_rank":0,"available_frequencies":[1200,1400],"pipe_schedule":null,"device_type":"","device":"","origin":"measured","blocking_w":null}');
INSERT INTO "energy_events" VALUES('2026-11-18-00-40-56+dp1+pp2+tp1+two-frequencies',2,'rank','{"rank":1,"dp_rank":0,"pp_rank":1,"tp_rank":0,"available_frequencies":[1200,1400],"pipe_schedule":null,"device_type":"","device":"","origin":"measured","blocking_w":null}');
CREATE TABLE energy_jobs (
        id TEXT PRIMARY KEY, body TEXT NOT NULL, configuration TEXT NOT NULL,
        created REAL NOT NULL, closed REAL, reason TEXT NOT NULL DEFAULT '');
INSERT INTO "energy_jobs" VALUES('2026-11-18-00-40-52+dp1+pp1+tp1+perseus','{"job_id":"","pp_degree":1,"dp_degree":1,"tp_degree":1,"world_size":1,"job_metadata":null,"framework":null,"model_name":null,"partition_method":null,"microbatch_size":null,"num_microbatches":2,"schedule":"1f1b","solution":null,"wish":null,"profile":{"format":"partita.energy-profile","version":1,"name":"profile","origin":"measured","device_types":[""],"stage":[0,0,0,0],"kind":[1,1,3,3],"device_type":[0,0,0,0],"clock_mhz":[1400.0,700.0,1400.0,700.0],"seconds":[1.0,1.8,2.0,3.6],"joules":[300.0,270.0,600.0,540.0],"blocking_w":{"":80.0}}}','95d8eff6c68845e664088403f4ddcd30fbf60b77a33816802ecf28cfa94d8dbf',1.79496245278656077386e+09,NULL,'');
INSERT INTO "energy_jobs" VALUES('2026-11-18-00-40-56+dp1+pp2+tp1+two-frequencies','{"job_id":"","pp_degree":2,"dp_degree":1,"tp_degree":1,"world_size":2,"job_metadata":null,"framework":null,"model_name":null,"partition_method":null,"microbatch_size":null,"num_microbatches":2,"schedule":"1f1b","solution":null,"wish":null,"profile":null}','aed9a0391ad54cc876dc9761bc02d1a0d793ab3f955732b441a6b2d6bec7dfef',1.7949624565303647518e+09,NULL,'');
COMMIT;
