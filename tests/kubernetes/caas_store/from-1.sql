-- From version 1 to 2: sizes of requests, indexes for long lists, whose a tenancy's name is.
alter table containers add column size integer not null default 0;
update containers set size = length(request);
create index sizes on containers (tenancy, id, gone, deleting, lifecycle, size);
create index events_of_tenancy on events (tenancy, id);
create table tenancies (name text primary key, uid text not null) without rowid;
