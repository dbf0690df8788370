PRAGMA application_id=1398229580;
PRAGMA user_version=7;
BEGIN TRANSACTION;
CREATE TABLE books (run INTEGER, time REAL, run_id TEXT, epoch INTEGER, run_samples INTEGER, vouched INTEGER, PRIMARY KEY (run_id));
INSERT INTO "books" VALUES(1,1790000016.0,'kept',3,3000,1);
CREATE TABLE contributions (run INTEGER, time REAL, run_id TEXT, peer TEXT, samples REAL, own_samples REAL, hours REAL, rounds INTEGER, reduced_bytes INTEGER, uptime REAL, first REAL, last REAL, name TEXT, team TEXT, PRIMARY KEY (run_id, peer));
INSERT INTO "contributions" VALUES(1,1790000016.0,'kept','bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb',900.0,600.0,1.5,3,24,24.0,1790000000.0,1790000016.0,'Bob','reds');
CREATE TABLE curve (
    run_id TEXT, epoch INTEGER, row INTEGER, stepped INTEGER NOT NULL DEFAULT 0,
    loss REAL, peers INTEGER NOT NULL DEFAULT 0, told REAL, PRIMARY KEY (run_id, epoch)
) WITHOUT ROWID;
INSERT INTO "curve" VALUES('kept',1,1,1,3.5,1,1790000000.0);
INSERT INTO "curve" VALUES('kept',2,2,1,3.0,1,1790000008.0);
INSERT INTO "curve" VALUES('kept',3,3,1,2.5,1,1790000016.0);
CREATE TABLE epochs (run INTEGER, time REAL, id INTEGER, epoch INTEGER, lineage TEXT, samples INTEGER, own_samples INTEGER, peers INTEGER, loss REAL, seconds REAL, averaging_seconds REAL, gradient_norm REAL, update_norm REAL, PRIMARY KEY (id));
INSERT INTO "epochs" VALUES(1,1790000000.0,1,1,'abababababababababababababababababababababababababababababababab',1000,0,2,NULL,8.0,0.25,NULL,NULL);
INSERT INTO "epochs" VALUES(1,1790000008.0,2,2,'abababababababababababababababababababababababababababababababab',1000,0,2,NULL,8.0,0.25,NULL,NULL);
INSERT INTO "epochs" VALUES(1,1790000016.0,3,3,'abababababababababababababababababababababababababababababababab',1000,0,2,NULL,8.0,0.25,NULL,NULL);
CREATE TABLE evaluations (run INTEGER, time REAL, id INTEGER, epoch INTEGER, loss REAL, samples INTEGER, metrics TEXT, lineage TEXT, peers INTEGER, PRIMARY KEY (id));
INSERT INTO "evaluations" VALUES(1,1790000000.0,1,1,3.0,256,'{}','',0);
INSERT INTO "evaluations" VALUES(1,1790000008.0,2,2,2.5,256,'{}','',0);
INSERT INTO "evaluations" VALUES(1,1790000016.0,3,3,2.0,256,'{}','',0);
CREATE TABLE events (run INTEGER, time REAL, id INTEGER, level TEXT, kind TEXT, peer TEXT, text TEXT, PRIMARY KEY (id));
INSERT INTO "events" VALUES(1,1790000000.0,1,'info','joined','bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','trainer bob joined');
INSERT INTO "events" VALUES(1,1790000000.0,2,'info','left out','','round at epoch 1 went on without cccccccccc (no part arrived for 4.0 s)');
INSERT INTO "events" VALUES(1,1790000000.0,3,'info','evaluation','','evaluated epoch 1: loss 3.0000 on 256 samples that nobody trains on');
INSERT INTO "events" VALUES(1,1790000000.0,4,'warning','notice','','word 1');
INSERT INTO "events" VALUES(1,1790000008.0,5,'info','left out','','round at epoch 2 went on without cccccccccc (no part arrived for 4.0 s)');
INSERT INTO "events" VALUES(1,1790000008.0,6,'info','evaluation','','evaluated epoch 2: loss 2.5000 on 256 samples that nobody trains on');
INSERT INTO "events" VALUES(1,1790000008.0,7,'warning','notice','','word 2');
INSERT INTO "events" VALUES(1,1790000016.0,8,'info','left','bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','trainer bob left');
INSERT INTO "events" VALUES(1,1790000016.0,9,'warning','round','bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','round at epoch 3 failed: bob was lost');
INSERT INTO "events" VALUES(1,1790000016.0,10,'info','evaluation','','evaluated epoch 3: loss 2.0000 on 256 samples that nobody trains on');
INSERT INTO "events" VALUES(1,1790000016.0,11,'warning','notice','','word 3');
CREATE TABLE failures (
    run_id TEXT, what TEXT, reason TEXT, count INTEGER, first REAL, last REAL, example TEXT,
    PRIMARY KEY (run_id, what, reason)
) WITHOUT ROWID;
INSERT INTO "failures" VALUES('kept','left out','no part arrived for … s',3,1790000000.0,1790000016.0,'no part arrived for 4.0 s');
INSERT INTO "failures" VALUES('kept','round','bob was lost',1,1790000016.0,1790000016.0,'bob was lost');
CREATE TABLE moments (
    run_id TEXT, scale INTEGER, slot INTEGER, first REAL, last REAL, count INTEGER, alive INTEGER, trainers INTEGER,
    rate REAL, epoch INTEGER, loss REAL, losses INTEGER, PRIMARY KEY (run_id, scale, slot)
) WITHOUT ROWID;
INSERT INTO "moments" VALUES('kept',4,447500000,1790000000.0,1790000000.0,1,3,2,125.0,1,3.5,1);
INSERT INTO "moments" VALUES('kept',4,447500002,1790000008.0,1790000008.0,1,3,2,125.0,2,3.0,1);
INSERT INTO "moments" VALUES('kept',4,447500004,1790000016.0,1790000016.0,1,3,2,125.0,3,2.5,1);
CREATE TABLE peers (run INTEGER, time REAL, peer TEXT, name TEXT, role TEXT, epoch INTEGER, samples INTEGER, samples_per_second REAL, client_mode INTEGER, gone TEXT, first_seen REAL, PRIMARY KEY (run, peer));
INSERT INTO "peers" VALUES(1,1790000016.0,'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','bob','trainer',3,30,12.5,0,'left',1790000000.0);
CREATE TABLE reports (run INTEGER, time REAL, peer TEXT, epoch INTEGER, loss REAL, samples INTEGER, samples_per_second REAL, PRIMARY KEY (run, peer, epoch));
INSERT INTO "reports" VALUES(1,1790000000.0,'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb',1,3.5,400,12.5);
INSERT INTO "reports" VALUES(1,1790000008.0,'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb',2,3.0,800,12.5);
INSERT INTO "reports" VALUES(1,1790000016.0,'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb',3,2.5,1200,12.5);
CREATE TABLE rounds (run INTEGER, time REAL, id INTEGER, round_id TEXT, purpose TEXT, outcome TEXT, reason TEXT, epoch INTEGER, leader TEXT, members TEXT, contributors TEXT, left_out TEXT, bytes_sent INTEGER, bytes_received INTEGER, seconds TEXT, PRIMARY KEY (id));
INSERT INTO "rounds" VALUES(1,1790000000.0,1,'efefefefefefefefefefefefefefefefefefefefefefefefefefefefefefefef','kept_grads','committed','',1,'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb", "cccccccccccccccccccccccccccccccccccccccccccccccccccc"]','["bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb", "cccccccccccccccccccccccccccccccccccccccccccccccccccc"]','{"cccccccccccccccccccccccccccccccccccccccccccccccccccc": "no part arrived for 4.0 s"}',1000,900,'{"averaging": 0.25}');
INSERT INTO "rounds" VALUES(1,1790000008.0,2,'efefefefefefefefefefefefefefefefefefefefefefefefefefefefefefefef','kept_grads','committed','',2,'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb", "cccccccccccccccccccccccccccccccccccccccccccccccccccc"]','["bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb", "cccccccccccccccccccccccccccccccccccccccccccccccccccc"]','{"cccccccccccccccccccccccccccccccccccccccccccccccccccc": "no part arrived for 4.0 s"}',1000,900,'{"averaging": 0.25}');
INSERT INTO "rounds" VALUES(1,1790000016.0,3,'efefefefefefefefefefefefefefefefefefefefefefefefefefefefefefefef','kept_grads','failed','bob was lost',3,'bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb','["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb", "cccccccccccccccccccccccccccccccccccccccccccccccccccc"]','["bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb", "cccccccccccccccccccccccccccccccccccccccccccccccccccc"]','{"cccccccccccccccccccccccccccccccccccccccccccccccccccc": "no part arrived for 4.0 s"}',1000,900,'{"averaging": 0.25}');
CREATE TABLE runs (run_id TEXT, role TEXT, peer TEXT, name TEXT, version TEXT, pid INTEGER, started REAL, last_seen REAL, finished REAL, outcome TEXT, id INTEGER, PRIMARY KEY (id));
INSERT INTO "runs" VALUES('kept','monitor','aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa','alice','0.1.0',21874,1790000000.0,1790000024.0,1790000024.0,'done',1);
CREATE TABLE totals (
    run_id TEXT PRIMARY KEY, epochs INTEGER NOT NULL DEFAULT 0, own_samples INTEGER NOT NULL DEFAULT 0,
    rounds_committed INTEGER NOT NULL DEFAULT 0, rounds_failed INTEGER NOT NULL DEFAULT 0,
    rounds_undecided INTEGER NOT NULL DEFAULT 0, bytes_sent INTEGER NOT NULL DEFAULT 0,
    bytes_received INTEGER NOT NULL DEFAULT 0, reached INTEGER NOT NULL DEFAULT -1
) WITHOUT ROWID;
INSERT INTO "totals" VALUES('kept',3,0,2,1,0,3000,2700,3);
CREATE INDEX idx_runs_run_id ON runs (run_id);
CREATE INDEX idx_epochs_run_epoch ON epochs (run, epoch);
CREATE INDEX idx_evaluations_run_epoch ON evaluations (run, epoch);
CREATE INDEX idx_rounds_run_epoch ON rounds (run, epoch);
CREATE INDEX idx_events_run_time ON events (run, time);
CREATE INDEX idx_reports_run_epoch ON reports (run, epoch);
CREATE TRIGGER begin_run AFTER INSERT ON runs BEGIN
    INSERT INTO totals (run_id) VALUES (new.run_id) ON CONFLICT DO NOTHING;
END;
CREATE TRIGGER add_epoch AFTER INSERT ON epochs BEGIN
    INSERT INTO curve (run_id, epoch) VALUES ((SELECT run_id FROM runs WHERE id = new.run), new.epoch) ON CONFLICT DO NOTHING;
    UPDATE totals SET
        epochs = epochs + (SELECT row IS NULL FROM curve WHERE run_id = totals.run_id AND epoch = new.epoch),
        own_samples = own_samples + coalesce(new.own_samples, 0), reached = max(reached, new.epoch)
        WHERE run_id = (SELECT run_id FROM runs WHERE id = new.run);
    -- a state that was downloaded later tells nothing about an epoch that was stepped here
    UPDATE curve SET row = new.id, stepped = new.samples > 0
        WHERE run_id = (SELECT run_id FROM runs WHERE id = new.run) AND epoch = new.epoch AND (new.samples > 0 OR NOT stepped);
END;
CREATE TRIGGER add_round AFTER INSERT ON rounds BEGIN
    UPDATE totals SET
        rounds_committed = rounds_committed + (new.outcome = 'committed'),
        rounds_failed = rounds_failed + (new.outcome = 'failed'),
        rounds_undecided = rounds_undecided + (new.outcome = 'undecided'),
        bytes_sent = bytes_sent + coalesce(new.bytes_sent, 0),
        bytes_received = bytes_received + coalesce(new.bytes_received, 0)
        WHERE run_id = (SELECT run_id FROM runs WHERE id = new.run);
END;
CREATE INDEX events_told ON events (id) WHERE level != 'detail';
CREATE INDEX peers_gone ON peers (time) WHERE gone != '';
COMMIT;
