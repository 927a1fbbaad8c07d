# Runs its arguments as a "child subreaper": slurmstepd detaches itself twice, and must stay in its node's process tree.
my %prctl = (x86_64 => 157, aarch64 => 167, ppc64le => 171);
my $machine = `uname -m`;
chomp $machine;
defined $prctl{$machine} and syscall($prctl{$machine}, 36, 1, 0, 0, 0);
exec { $ARGV[0] } @ARGV;
