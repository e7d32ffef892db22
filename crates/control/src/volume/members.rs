//! Which copies of a volume count. A new copy counts as soon as it holds everything. A copy that is to go counts until
//! as many others hold everything as are asked for.
//!
//! The function is pure. The target calls it, because it has just seen the copies. What is stored about them may be
//! outdated, and a copy that was removed by mistake is gone.
//!
//! A replacement works like this: another copy is made, it is repaired without being counted, and then it takes the
//! place of the leaving copy in one change of the view. There are never fewer full copies than before, and the view is
//! never larger than what is asked for or what it was, even with five copies.

use trellis_api::kinds::{CopiesWanted, Members};

/// Which copies should count, given which do now and which were just seen to hold everything.
///
/// A copy that is away or whose disk is dead goes on the same terms: what it has may still be needed until there are
/// enough others.
pub fn who_counts(
    wanted: &CopiesWanted,
    now: &Members,
    holds_everything: &dyn Fn(&str) -> bool,
) -> Members {
    let count = usize::try_from(wanted.count).unwrap_or(usize::MAX);
    if count == 0 {
        return now.clone();
    }
    let stays = |id: &&String| wanted.staying.contains(*id);
    let (mut members, mut leaving): (Vec<&String>, Vec<&String>) =
        now.replicas.iter().partition(stays);
    // The least useful ones go first.
    leaving.sort_by_key(|id| (holds_everything(id), (*id).clone()));
    let all = wanted.staying.iter().chain(leaving.iter().copied());
    let mut full = all.filter(|id| holds_everything(id)).count();
    for id in leaving {
        let without = full - usize::from(holds_everything(id));
        if without >= count {
            full = without;
        } else {
            members.push(id);
        }
    }
    let room = count.max(now.replicas.len()).saturating_sub(members.len());
    let new = wanted
        .staying
        .iter()
        .filter(|id| !now.replicas.contains(*id) && holds_everything(id));
    members.extend(new.take(room));
    let mut replicas: Vec<String> = members.into_iter().cloned().collect();
    replicas.sort_unstable();
    Members {
        version: now.version,
        consistency_factor: factor(wanted, now, replicas.len()),
        replicas,
    }
}

/// The factor that is asked for. It rises only when there are as many copies as are asked for: with fewer, the next
/// copy that goes away would stop the volume.
fn factor(wanted: &CopiesWanted, now: &Members, members: usize) -> u32 {
    let members = u32::try_from(members).unwrap_or(u32::MAX);
    let asked = if members >= wanted.count {
        wanted.consistency_factor
    } else {
        wanted.consistency_factor.min(now.consistency_factor)
    };
    asked.clamp(1, members.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies by single letters: who is to stay, who counts, who holds everything.
    fn decided(
        count: u32,
        factor: u32,
        staying: &str,
        now: (&str, u32),
        full: &str,
    ) -> (String, u32) {
        let list = |text: &str| text.chars().map(String::from).collect::<Vec<_>>();
        let wanted = CopiesWanted {
            count,
            consistency_factor: factor,
            staying: list(staying),
        };
        let now = Members {
            version: 1,
            consistency_factor: now.1,
            replicas: list(now.0),
        };
        let found = who_counts(&wanted, &now, &|id| full.contains(id));
        (found.replicas.concat(), found.consistency_factor)
    }

    fn is(members: &str, factor: u32) -> (String, u32) {
        (members.to_owned(), factor)
    }

    // Fails if a copy that is replaced goes before another one holds everything, or stays when one does.
    #[test]
    fn a_copy_counts_until_enough_others_hold_everything() {
        // a is replaced by c, of two and with a factor of two.
        assert_eq!(decided(2, 2, "b", ("ab", 2), "ab"), is("ab", 2));
        assert_eq!(decided(2, 2, "bc", ("ab", 2), "ab"), is("ab", 2));
        assert_eq!(decided(2, 2, "bc", ("ab", 2), "abc"), is("bc", 2));
        // With a factor of one it is the same.
        assert_eq!(decided(2, 1, "bc", ("ab", 1), "ab"), is("ab", 1));
        assert_eq!(decided(2, 1, "bc", ("ab", 1), "abc"), is("bc", 1));
        // Of three, with b behind: three others must be whole, not a quorum of them.
        assert_eq!(decided(3, 1, "bcd", ("abc", 1), "acd"), is("abc", 1));
        assert_eq!(decided(3, 1, "bcd", ("abc", 1), "abcd"), is("bcd", 1));
    }

    // Fails if a dead disk keeps its copy for ever, or costs the chance that it comes back before it is replaced.
    #[test]
    fn a_copy_that_is_away_goes_when_it_is_replaced() {
        assert_eq!(decided(3, 2, "bcd", ("abc", 2), "bc"), is("abc", 2));
        assert_eq!(decided(3, 2, "bcd", ("abc", 2), "bcd"), is("bcd", 2));
        // Its object is gone as well.
        assert_eq!(decided(2, 1, "bc", ("ab", 1), "b"), is("ab", 1));
        assert_eq!(decided(2, 1, "bc", ("ab", 1), "bc"), is("bc", 1));
    }

    // Fails if a smaller number of copies keeps one that is not whole instead of one that is.
    #[test]
    fn fewer_copies_are_those_that_hold_everything() {
        assert_eq!(decided(2, 2, "ab", ("abc", 2), "abc"), is("ab", 2));
        assert_eq!(decided(2, 2, "ab", ("abc", 2), "ac"), is("abc", 2));
        assert_eq!(decided(2, 2, "ac", ("abc", 2), "ac"), is("ac", 2));
        assert_eq!(decided(1, 1, "a", ("ab", 2), "b"), is("ab", 1));
    }

    // Fails if more copies than a view can have are asked for, or the fifth cannot be replaced.
    #[test]
    fn one_of_five_is_replaced_in_one_change() {
        assert_eq!(
            decided(5, 3, "bcdef", ("abcde", 3), "abcde"),
            is("abcde", 3)
        );
        assert_eq!(
            decided(5, 3, "bcdef", ("abcde", 3), "abcdef"),
            is("bcdef", 3)
        );
        assert_eq!(
            decided(5, 3, "bcdef", ("abcde", 3), "acdef"),
            is("abcde", 3)
        );
        assert_eq!(
            decided(5, 3, "fghij", ("abcde", 3), "abcdefghij"),
            is("fghij", 3)
        );
    }

    // Fails if several copies that are replaced wait for each other.
    #[test]
    fn copies_that_are_replaced_together_go_one_by_one() {
        assert_eq!(decided(3, 2, "d", ("abc", 2), "abcd"), is("bcd", 2));
        assert_eq!(decided(3, 2, "de", ("bcd", 2), "bcde"), is("cde", 2));
    }

    // Fails if a factor rises before there are the copies for it, or does not follow what is asked for.
    #[test]
    fn the_factor_rises_with_the_copies() {
        assert_eq!(decided(5, 3, "abcde", ("abc", 2), "abc"), is("abc", 2));
        assert_eq!(decided(5, 3, "abcde", ("abc", 2), "abcd"), is("abcd", 2));
        assert_eq!(decided(5, 3, "abcde", ("abcd", 2), "abcde"), is("abcde", 3));
        assert_eq!(decided(2, 1, "ab", ("ab", 2), "ab"), is("ab", 1));
        assert_eq!(decided(2, 2, "ab", ("ab", 1), "a"), is("ab", 2));
    }
}
