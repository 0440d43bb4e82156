-- A new file of version 1.
create table meta (name text primary key, value blob not null) without rowid;
create table containers (
  id text primary key, tenancy text not null, created real not null, request text not null, secrets text,
  made integer not null default 0, deleting integer not null default 0, gone integer not null default 0,
  lifecycle text not null default 'accepted', reason text not null default '', standing text not null default '{}',
  version integer not null default 1
) without rowid;
create index by_tenancy on containers (tenancy, id);
create index live on containers (gone, lifecycle);
create table events (
  id integer primary key autoincrement, at real not null, kind text not null, container text not null,
  tenancy text not null, lifecycle text not null, reason text not null, detail text not null
);
create index of_container on events (container, id);
create table idempotency (
  tenancy text not null, key blob not null, body blob not null, container text not null, expires real not null,
  primary key (tenancy, key)
) without rowid;
create table keys (
  id text primary key, hash blob not null, tenancy text, scopes text not null, label text not null,
  created real not null, expires real, revoked integer not null default 0
) without rowid;
create table logs (container text primary key, text blob not null) without rowid;
