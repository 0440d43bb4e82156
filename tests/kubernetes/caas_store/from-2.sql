-- From version 2 to 3: details quoted what containers printed, which takes another scope.
update events set detail = '' where reason in ('exit_nonzero', 'oom_killed', 'cuda_fabric_not_ready', 'restarting');
update containers set standing = json_set(standing, '$.detail', '')
  where reason in ('exit_nonzero', 'oom_killed', 'cuda_fabric_not_ready', 'restarting');
